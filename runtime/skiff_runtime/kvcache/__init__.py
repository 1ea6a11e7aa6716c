"""The paged KV cache: the page allocator, the prefix caches, and the tensors (``kv_pool`` alone imports torch)."""
