"""Data planes of accelerators behind the elastic process groups.

A group's object, members, ranks, tags and epochs are ours on every device. What moves the bytes depends on where the
tensors lie: CPU tensors go over our transport, CUDA tensors through an inner ``ProcessGroupNCCL``, NPU tensors through
an inner ``ProcessGroupHCCL``. Inner groups come and go with epochs; callers never see them.

``group`` routes a call, ``plane`` owns one inner group and decides whether it is kept, shrunk or made anew,
``rendezvous`` introduces its members to each other, ``nccl`` and ``hccl`` know the vendors' calls, ``accelerator``
holds what all planes of the process share.

State: call sequences are unit-tested against recorded fakes; ``scripts/check_on_device.py`` is for hardware.
"""
