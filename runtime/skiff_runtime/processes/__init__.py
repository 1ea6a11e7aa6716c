"""The processes of one service: supervisor, children, and how they are launched."""
