"""Next tokens that no weights predict, by hand. More in tests/theory, against a plain program."""

import pytest
import torch

from attnmem.theory.impossible import every_parity, impossible_subset


@pytest.mark.parametrize("bits", [2, 3, 4])
def test_proof_of_a_parity_is_its_signs(bits):
    rows, parity = every_parity(bits)
    proof = impossible_subset(rows, parity, heads=bits - 1)
    assert proof.rows.tolist() == [*range(2**bits)]
    assert proof.tokens.tolist() == [0, 1]
    signs = 1 - 2 * parity
    assert proof.weights.tolist() == torch.stack([signs, -signs], dim=1).tolist()
    assert impossible_subset(rows, parity, heads=bits) is None


@pytest.mark.parametrize("last", [0, 1, 2])
def test_only_sequences_of_one_last_token_contradict(last):
    """The xor of two bits behind one last token, their first bit behind two others."""
    rows = torch.cartesian_prod(*[torch.arange(2)] * 2, torch.arange(3))
    xor = (rows[:, 0] + rows[:, 1]) % 2
    labels = torch.where(rows[:, 2] == last, 5 + xor, rows[:, 0])
    proof = impossible_subset(rows, labels, heads=1)
    assert (rows[proof.rows][:, 2] == last).all()
    assert proof.tokens.tolist() == [5, 6]


def test_sequences_in_no_relation_are_left_out():
    """Ones that share no place with others have functions of their own."""
    rows, parity = every_parity(2)
    alone = torch.tensor([[7, 8, 0], [8, 9, 0]])
    proof = impossible_subset(torch.cat([alone, rows]), torch.cat([parity[:2], parity]), heads=1)
    assert proof.rows.tolist() == [2, 3, 4, 5]
