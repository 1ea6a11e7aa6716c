"""Structured output: grammars of answers, compiled for the vocabulary and matched token by token.

``spec`` makes a grammar of a request's parameters, ``schema`` lowers JSON schemas, ``compiler`` compiles in a child
process, and ``matcher`` fills the token bitmasks of running requests.
"""

import os

# xgrammar's tvm-ffi would otherwise compile a C++ extension when it is first imported beside an older torch.
os.environ.setdefault("TVM_FFI_DISABLE_TORCH_C_DLPACK", "1")
