"""``skiff bench router``: what a router costs, and what clients see when a pod fails behind it."""
