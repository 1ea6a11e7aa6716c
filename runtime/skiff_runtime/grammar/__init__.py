"""Structured output: what an answer must match, compiled for the vocabulary and followed token by token."""

import os

# xgrammar's tvm-ffi would otherwise compile a C++ extension when it is first imported beside an older torch.
os.environ.setdefault("TVM_FFI_DISABLE_TORCH_C_DLPACK", "1")
