"""Arithmetic modulo a prime: ranks, products, and derivatives of a head, one for each weight."""

import numpy as np

PRIME = 67_108_859  # so that sums of 2,000 products are exact in 64 bits


def rank(rows):
    """By elimination."""
    rows, found = rows % PRIME, 0
    for column in range(rows.shape[1]):
        at = found + np.flatnonzero(rows[found:, column])
        if not len(at):
            continue
        rows[[found, at[0]]] = rows[[at[0], found]]
        pivot = rows[found] * pow(int(rows[found, column]), -1, PRIME) % PRIME
        rows[found] = pivot
        rows[found + 1 :] -= rows[found + 1 :, column, None] * pivot % PRIME
        rows[found + 1 :] %= PRIME
        found += 1
        if found == len(rows):
            break
    return found


def product(A, B):
    return A @ B % PRIME


def shares(powers):
    """What sums to one in each row, in proportion."""
    totals = powers.sum(-1, keepdims=True) % PRIME
    inverses = [pow(int(total), -1, PRIME) for total in totals.flat]
    return powers * np.reshape(inverses, totals.shape) % PRIME


def through(X, dX, W, columns):
    """X W, and how it changes with all weights, of which the next columns are those of W."""
    change = product(dX, W)
    for (i, j), column in zip(np.ndindex(*W.shape), columns, strict=False):
        change[:, column, :, j] += X[..., i]
    return product(X, W), change % PRIME


def written(X, dX, maps, A, columns):
    """What a head of attention A writes by its maps to Q, K, V and back, and how it changes."""
    (Q, dQ), (K, dK), (V, dV) = (through(X, dX, W, columns) for W in maps[:3])
    logits = product(dQ, K.swapaxes(1, 2)[:, None])
    logits += product(Q[:, None], dK.swapaxes(2, 3))
    logits %= PRIME
    means = (A[:, None] * logits % PRIME).sum(-1, keepdims=True)
    dA = A[:, None] * ((logits - means) % PRIME) % PRIME
    changed = (product(dA, V[:, None]) + product(A[:, None], dV)) % PRIME
    return through(product(A, V), changed, maps[3], columns)
