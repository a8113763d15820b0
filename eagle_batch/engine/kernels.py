"""Kernels for what a round decides on the CPU: the best tokens, a draft's tree, the walk down it.

Each of them replaces some tens of small operators of torch, whose dispatch takes longer than what
they do. The same work for other devices, and where there is no numba, is in `sampling`, `tree` and
`verify`; both give the same answers, ties included.

Shape legend: R rows of logits, V vocabulary, K best ones, B rows, C candidate records, N nodes with
the root, A places of a path.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from eagle_batch.models.compiling import compiled
from eagle_batch.models.kernels import exponential

F32 = np.float32
_LOWEST = F32(-np.inf)
#: Logits that are looked through at once.
_BLOCK = 512

_kernel: Any = compiled(error_model="numpy", nogil=True)
#: For numbers that are known to be numbers.
_numbers: Any = compiled(fastmath={"nnan", "nsz", "reassoc"}, error_model="numpy")


@_kernel
def _not_a_number(x_V):
    """Return the place of the first NaN, -1 where there is none."""
    found = 0
    for v in range(x_V.shape[0]):
        found |= x_V[v] != x_V[v]  # Only a NaN differs from itself.
    if found:
        for v in range(x_V.shape[0]):
            if np.isnan(x_V[v]):
                return v
    return -1


@_numbers
def highest_of(x_V):
    """Return the highest of some numbers."""
    highest = x_V[0]
    for v in range(x_V.shape[0]):
        highest = max(highest, x_V[v])
    return highest


@_kernel
def peak_of(x_V):
    """Return the place of the highest number: the first of equals, or the first NaN."""
    place = _not_a_number(x_V)
    if place >= 0:
        return place
    highest, where = _LOWEST, 0
    for start in range(0, x_V.shape[0], _BLOCK):
        value = highest_of(x_V[start : start + _BLOCK])
        if value > highest:
            highest, where = value, start
    while x_V[where] < highest:
        where += 1
    return where


@_kernel
def peaks(x_RV, place_R):
    """Write the place of the highest number of every row; see `peak_of`."""
    for r in range(x_RV.shape[0]):
        place_R[r] = peak_of(x_RV[r])


@_numbers
def _sum_of_exponentials(x_V, highest):
    total = F32(0)
    for v in range(x_V.shape[0]):
        total += exponential(x_V[v] - highest)
    return total


@_kernel
def best(x_RV, value_RK, place_RK, total_R):
    """Write the K highest numbers of every row in falling order, and its logsumexp.

    Of equals the first comes first. A row with a NaN has nothing but NaN.
    """
    for r in range(x_RV.shape[0]):
        total_R[r] = best_of(x_RV[r], value_RK[r], place_RK[r])


@_kernel
def best_of(x_V, value_K, place_K):
    """Write the K highest numbers in falling order; return the logsumexp of all. See `best`."""
    count, taken = value_K.shape[0], 0
    value_K[:], place_K[:] = _LOWEST, 0
    if _not_a_number(x_V) >= 0:
        value_K[:] = np.nan
        return F32(np.nan)
    for start in range(0, x_V.shape[0], _BLOCK):
        stop = min(start + _BLOCK, x_V.shape[0])
        # Most blocks hold nothing that is among the best.
        if taken == count and highest_of(x_V[start:stop]) <= value_K[count - 1]:
            continue
        for v in range(start, stop):
            if taken < count or x_V[v] > value_K[count - 1]:
                taken = min(taken + 1, count)
                insert(value_K, place_K, taken - 1, x_V[v], v)
    highest = value_K[0]
    return highest + np.log(_sum_of_exponentials(x_V, highest)) if highest > _LOWEST else highest


@_kernel
def insert(value_K, place_K, last, value, place):
    """Put a value among those before `last`, behind its equals."""
    k = last
    while k > 0 and value_K[k - 1] < value:
        value_K[k], place_K[k] = value_K[k - 1], place_K[k - 1]
        k -= 1
    value_K[k], place_K[k] = value, place


@_kernel
def advance(gain_BKK, score_BK, visible_BKM, score_BC, pick_BK, best_BK, visible_BKX):
    """Score the children of a frontier and pick the K best of them as the next one.

    score_BC: out, C = K * K. pick: out, falling; of equals the first comes first. visible_BKX: out,
    X = M + K; the scratch columns that the next frontier sees.
    """
    frontier, above = (gain_BKK, score_BK, visible_BKM), visible_BKM.shape[2]
    for b in range(gain_BKK.shape[0]):
        found = (score_BC, pick_BK, best_BK, visible_BKX)
        advance_row(b, gain_BKK.shape[1], frontier, above, 0, found)


@_kernel
def advance_row(b, parents, frontier, above, first, found):
    """Advance the frontier of a row from some parents to their K best children; see `advance`.

    above: scratch columns that parents may see. first: where the row's records of this level begin.
    """
    gain_BPK, score_BP, visible_BPM = frontier
    score_BC, pick_BK, best_BK, visible_BKX = found
    width = gain_BPK.shape[2]
    taken = np.zeros(parents * width, np.bool_)
    for c in range(parents * width):
        score_BC[b, first + c] = gain_BPK[b, c // width, c % width] + score_BP[b, c // width]
    for k in range(width):
        c = _next_best(score_BC, b, first, taken)
        taken[c] = True
        pick_BK[b, k], best_BK[b, k] = c, score_BC[b, first + c]
        for m in range(above):
            visible_BKX[b, k, m] = visible_BPM[b, c // width, m]
        for m in range(width):
            visible_BKX[b, k, above + m] = m == k


@_kernel
def _next_best(score_BC, b, first, taken_C):
    """Return which of the scores from `first` on is the highest not taken; a NaN is the lowest."""
    found, highest = -1, _LOWEST
    for c in range(taken_C.shape[0]):
        score = score_BC[b, first + c]
        if not taken_C[c] and (found < 0 or score > highest):
            found = c
            highest = _LOWEST if np.isnan(score) else score
    return found


@_kernel
def plant(records, root_B, width, least, tree_F, ancestor_BNN):
    """Make the tree of the best records; the fields of `tree_F` are those of a `DraftTree`.

    records: tokens, scores and parents, `[B, C]` each. least: score below which nodes carry -1.
    """
    for b in range(root_B.shape[0]):
        plant_row(b, records, root_B[b], width, least, tree_F, ancestor_BNN)


@_kernel
def plant_row(b, records, root, width, least, tree_F, ancestor_BNN):
    """Make the tree of one row; see `plant`."""
    token_BC, score_BC, parent_BC = records
    token_BN, parent_BN, depth_BN, order_BN, rank_BN = tree_F
    order_C = np.zeros(token_BC.shape[1], np.int64)
    for order in range(1, token_BN.shape[1]):
        order_C[_next_best(score_BC, b, 0, order_C > 0)] = order
    ancestor_BNN[b] = False
    token_BN[b, 0], parent_BN[b, 0], depth_BN[b, 0] = root, 0, 0
    order_BN[b, 0], rank_BN[b, 0], ancestor_BNN[b, 0, 0] = 0, 0, True
    node_C, n = np.zeros(token_BC.shape[1], np.int64), 0
    for c in range(token_BC.shape[1]):
        if order_C[c] == 0:
            continue
        n += 1
        node_C[c] = n
        parent = node_C[parent_BC[b, c]] if parent_BC[b, c] >= 0 else 0
        token_BN[b, n] = -1 if score_BC[b, c] < least else token_BC[b, c]
        parent_BN[b, n] = parent
        depth_BN[b, n] = depth_BN[b, parent] + 1
        order_BN[b, n], rank_BN[b, n] = order_C[c], c % width
        for m in range(n):
            ancestor_BNN[b, n, m] = ancestor_BNN[b, parent, m]
        ancestor_BNN[b, n, n] = True


@_kernel
def look_back(token_BC, last_B, longest, draft_BD, length_B):
    """Write what followed the latest place that ends as each row does, and how many tokens agree.

    last: column of each row's last token. longest: most tokens that are compared, and the columns
    before the first token.
    """
    for b in range(last_B.shape[0]):
        last, most, place = last_B[b], 0, last_B[b] - 1
        for c in range(last_B[b] - 1, longest - 1, -1):
            count = 0
            while count < longest and token_BC[b, c - count] == token_BC[b, last - count] >= 0:
                count += 1
            if count > most:
                most, place = count, c
            if most == longest:
                break
        length_B[b] = most
        for d in range(draft_BD.shape[1]):
            # Beyond the last token it begins again: the text goes round in a circle.
            draft_BD[b, d] = max(token_BC[b, place + 1 + d % (last - place)], 0)


@_kernel
def merge(tree_F, ancestor_BNN, chain_BD, behind, out_F, out_BXX):
    """Hang a chain on a tree, from the deepest node down that carries its tokens.

    behind: the order that the nodes of the chain come behind.

    tree_F, out_F: tokens, parents, depths, orders and ranks, `[B, N]` and `[B, X]`, X = N + D.
    """
    token_BN, parent_BN, depth_BN, order_BN, rank_BN = tree_F
    token_BX, parent_BX, depth_BX, order_BX, rank_BX = out_F
    nodes, branch = token_BN.shape[1], chain_BD.shape[1]
    out_BXX[:] = False
    for b in range(token_BN.shape[0]):
        for n in range(nodes):
            token_BX[b, n], parent_BX[b, n] = token_BN[b, n], parent_BN[b, n]
            depth_BX[b, n], order_BX[b, n] = depth_BN[b, n], order_BN[b, n]
            rank_BX[b, n] = rank_BN[b, n]
            for m in range(nodes):
                out_BXX[b, n, m] = ancestor_BNN[b, n, m]
        parent = 0
        for d in range(branch):
            n, token = nodes + d, chain_BD[b, d]
            token_BX[b, n], parent_BX[b, n], order_BX[b, n] = token, parent, behind + d + 1
            depth_BX[b, n], rank_BX[b, n] = depth_BX[b, parent] + 1, 0
            for m in range(n):
                out_BXX[b, n, m] = out_BXX[b, parent, m]
            out_BXX[b, n, n] = True
            # Where the tree has the token already, the chain goes on below its node.
            for known in range(nodes - 1, 0, -1):
                if parent_BN[b, known] == parent and token_BN[b, known] == token:
                    n = known
            parent = n


@_kernel
def follow(parent_BN, token_BN, chosen_BN, path_BA, token_BA, accepted_B):
    """Follow the target's choices down the trees; the fields are those of a `Verdict`."""
    nodes = token_BN.shape[1]
    for b in range(path_BA.shape[0]):
        node, accepted, alive = 0, 0, True
        for a in range(path_BA.shape[1]):
            path_BA[b, a], token_BA[b, a] = node, chosen_BN[b, node]
            accepted_B[b] = accepted
            child = nodes
            if alive:
                child = node + 1
                while child < nodes and not (
                    parent_BN[b, child] == node and token_BN[b, child] == chosen_BN[b, node]
                ):
                    child += 1
            alive = child < nodes
            if alive:
                node, accepted = child, accepted + 1
