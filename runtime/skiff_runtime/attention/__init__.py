"""Attention backends behind one interface, one file each."""
