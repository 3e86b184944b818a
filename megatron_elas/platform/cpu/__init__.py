"""A stand-in for ``torch.cuda`` that lets Megatron train on CPUs, over gloo.

Only torch is touched, never Megatron, and only by ``install()``. Calls that worked before give the
same results afterwards; calls that would have failed for want of a GPU now work on the CPU.
"""

from megatron_elas.platform.cpu.stand_in import install, is_installed, uninstall

__all__ = ["install", "is_installed", "uninstall"]
