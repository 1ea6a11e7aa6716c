"""Operations on a device that layers and the engine share: in PyTorch and, for GPUs, as Triton kernels.

A function here chooses by the device of its tensors: on a GPU the kernel of the same name below ``triton/``, imported
there and then, because a CPU needs no Triton; elsewhere PyTorch, which is also what tests compare the kernels with.
``tuning`` holds all numbers that were measured.
"""
