"""Grammar compilation by xgrammar, in a process of its own."""
