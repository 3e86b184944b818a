"""Every layer is a bucket, and every bucket can be cut for any smaller number of replicas."""

from __future__ import annotations

import itertools
import math

from hypothesis import given
from hypothesis import strategies as st

from megatron_elas.spec.buckets import (
    CUT,
    LAYER_ATTRIBUTE,
    SHARE,
    bucket_size,
    compact_index,
    layer_buckets,
    owned_range,
)


class Parameter:
    """Stands for a parameter: a size, and the layer it belongs to."""

    def __init__(self, numel: int, layer: int | None) -> None:
        self._numel = numel
        if layer is not None:
            setattr(self, LAYER_ATTRIBUTE, layer)

    def numel(self) -> int:
        return self._numel


def model(sizes: list[list[int]]) -> list[Parameter]:
    """Embeddings, layers, a final norm and a head."""
    layers = [Parameter(numel, number) for number, layer in enumerate(sizes, start=1) for numel in layer]
    return [Parameter(1000, None), Parameter(100, None), *layers, Parameter(64, None), Parameter(1000, None)]


def test_what_comes_before_and_after_the_layers_is_a_bucket_as_is_every_layer() -> None:
    params = model([[300, 20], [300, 20]])
    layout = layer_buckets(params, 2)
    assert [layout.index[p][2] for p in params] == [3, 3, 2, 2, 1, 1, 0, 0]
    assert len(layout.buckets) == 4


@given(
    sizes=st.lists(st.lists(st.integers(1, 5000), min_size=1, max_size=4), min_size=1, max_size=5),
    replicas=st.integers(1, 24),
)
def test_buckets_fit_any_number_of_replicas_up_to_the_first(sizes: list[list[int]], replicas: int) -> None:
    params = model(sizes)
    layout = layer_buckets(params, replicas)
    index, buckets, unpadded, total = layout.index, layout.buckets, layout.unpadded, layout.numel
    assert total % math.lcm(128, replicas) == 0
    spans = sorted(index.values())
    assert all(a[1] <= b[0] for a, b in itertools.pairwise(spans)), "parameters overlap"
    for number, ((start, end), numel) in enumerate(zip(buckets, unpadded, strict=True)):
        following = buckets[number + 1][0] if number + 1 < len(buckets) else total
        assert end - start == bucket_size(numel, replicas)
        assert start % replicas == 0 and start % SHARE == 0 and end % replicas == 0
        for fewer in range(1, replicas + 1):
            size = bucket_size(numel, fewer)
            assert size % fewer == 0 and size // fewer % SHARE == 0 and size >= numel
            assert start + size <= following
    for start, end, bucket in index.values():
        assert buckets[bucket][0] <= start and end <= buckets[bucket][0] + unpadded[bucket]


@given(
    sizes=st.lists(st.lists(st.integers(1, 5000), min_size=1, max_size=4), min_size=1, max_size=5),
    launched=st.integers(1, 24),
    replicas=st.integers(1, 24),
)
def test_a_parameter_is_cut_at_multiples_of_so_many_elements_from_its_start(
    sizes: list[list[int]], launched: int, replicas: int
) -> None:
    layout = layer_buckets(model(sizes), launched)
    for start, end, bucket in layout.index.values():
        first = layout.buckets[bucket][0]
        assert start % CUT == 0
        for replica in range(replicas):
            for edge in owned_range(replica, replicas, layout.unpadded[bucket]):
                assert not start < first + edge < end or (first + edge - start) % CUT == 0


def test_a_tied_embedding_is_alone_in_its_bucket() -> None:
    params = model([[300]])
    params[0].shared_embedding = True  # type: ignore[attr-defined]
    assert [layer_buckets(params, 2).index[p][2] for p in params] == [3, 2, 1, 0, 0]


def test_the_compact_index_leaves_out_padding_and_room_and_nothing_else() -> None:
    params = model([[300, 20], [77]])
    layout = layer_buckets(params, 4)
    index, buckets, unpadded = layout.index, layout.buckets, layout.unpadded
    compact = compact_index(index, [start for start, _ in buckets], unpadded)
    assert max(end for _, end, _ in compact.values()) == sum(unpadded)
    for param, (start, end, bucket) in compact.items():
        assert end - start == param.numel()
        assert start - sum(unpadded[:bucket]) == index[param][0] - buckets[bucket][0]
