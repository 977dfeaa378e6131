"""Models trained here, and weights from a graph of operations."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from attnmem.features import encoders, pretrained


@pytest.mark.parametrize(
    ("train", "options", "least", "most"),
    [
        (pretrained.digits_vit, {"steps": 150, "batch": 64}, 0.2, 1),  # of ten digits
        (pretrained.library_bert, {"steps": 30, "batch": 8}, 0.1, 0.5),  # a quarter are spaces
        (pretrained.library_gpt2, {"steps": 30, "batch": 8}, 0.1, 0.5),
    ],
)
def test_models_trained_here_learn_and_load(train, options, least, most, tmp_path):
    state = torch.get_rng_state()
    assert least < train(tmp_path, seed=0, **options) < most
    assert torch.equal(state, torch.get_rng_state())
    assert encoders.trained_encoder(str(tmp_path), depth=2).depth == 2


def test_weights_of_a_graph_have_their_names():
    """A product's weight is named by its operation, and lies the other way round."""
    cls, patches = np.ones((1, 4)), np.zeros((1, 37**2, 4))
    matrix = np.arange(12.0).reshape(3, 4)
    arrays = {"backbone.norm.bias": np.ones(4), "val_1": matrix, "cls": cls, "places": patches}
    nodes = [
        ("MatMul", "/backbone/layer.0/query/MatMul", ["x", "val_1"]),
        ("MatMul", "/backbone/layer.0/scores/MatMul", ["q", "k"]),
        ("Concat", "/backbone/Concat", ["cls", "x"]),
    ]
    graph = [SimpleNamespace(op_type=op, name=name, input=inputs) for op, name, inputs in nodes]
    weights = pretrained._dinov2(graph, arrays)
    assert (weights.pop("layer.0.query.weight") == matrix.T).all()
    assert weights.pop("embeddings.position_embeddings")[0, :2].tolist() == [[1] * 4, [0] * 4]
    assert not weights.pop("embeddings.mask_token").any()
    assert [*weights] == ["norm.bias"]
