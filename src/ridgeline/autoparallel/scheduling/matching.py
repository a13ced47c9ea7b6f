"""Maximum bipartite matching: as many pairs as possible, no vertex in two of them."""

from collections.abc import Sequence

from ridgeline.autoparallel.graphs.dag import members


def maximum_matching(neighbours: Sequence[int]) -> list[int]:
    """For each left vertex its right partner, or -1; as many pairs as there can be.

    Args:
        neighbours: For each left vertex the bit mask of the right vertices that it may be paired with.

    Source: Hopcroft, Karp 1973: in each phase the shortest augmenting paths, as many as are disjoint.
        At most about 2 sqrt(n) phases. Layers are bit masks and the search keeps its own stack, so
        that thousands of vertices need neither adjacency lists nor deep recursion.
    """
    right_of = [-1] * len(neighbours)
    left_of: dict[int, int] = {}
    free = 0
    for mask in neighbours:
        free |= mask
    for left, mask in enumerate(neighbours):
        # A greedy start pairs most vertices, so that few phases are left.
        if open_to := mask & free:
            free ^= _pair(left, open_to, right_of, left_of)
    while layers := _layers(neighbours, right_of, left_of, free):
        for left, right in enumerate(right_of):
            if right < 0:
                free ^= _augment(left, neighbours, layers, right_of, left_of)
    return right_of


def _pair(left: int, open_to: int, right_of: list[int], left_of: dict[int, int]) -> int:
    """Pair `left` with the first of `open_to`; the bit of that right vertex."""
    bit = open_to & -open_to
    right_of[left] = bit.bit_length() - 1
    left_of[right_of[left]] = left
    return bit


def _layers(
    neighbours: Sequence[int], right_of: Sequence[int], left_of: dict[int, int], free: int
) -> list[int]:
    """Right vertices by distance from a left one without partner, the last layer free; none where none is."""
    layers: list[int] = []
    seen = 0
    frontier = [left for left, right in enumerate(right_of) if right < 0]
    while True:
        layer = 0
        for left in frontier:
            layer |= neighbours[left]
        layer &= ~seen
        if layer & free:
            return [*layers, layer & free]
        if not layer:
            return []
        layers.append(layer)
        seen |= layer
        frontier = [left_of[right] for right in members(layer)]


def _augment(
    left: int,
    neighbours: Sequence[int],
    layers: list[int],
    right_of: list[int],
    left_of: dict[int, int],
) -> int:
    """Turn a shortest path from `left` around; the bit of the right vertex that it uses up, or 0."""
    path = [(left, 0)]
    while path:
        here, _ = path[-1]
        depth = len(path) - 1
        open_to = neighbours[here] & layers[depth]
        if not open_to:
            path.pop()
            continue
        bit = open_to & -open_to
        # Also where the path turns out to be a dead end: paths of one phase share no vertex.
        layers[depth] ^= bit
        path[-1] = (here, bit)
        if depth < len(layers) - 1:
            path.append((left_of[bit.bit_length() - 1], 0))
            continue
        for vertex, taken in path:
            _pair(vertex, taken, right_of, left_of)
        return bit
    return 0
