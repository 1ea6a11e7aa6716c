"""Pages of KV memory: allocator, radix tree, naive cache, and (in pool.py alone) the tensors."""
