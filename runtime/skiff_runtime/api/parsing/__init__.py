"""What the text of a chat answer means: reasoning and tool calls in the formats that models were trained on."""
