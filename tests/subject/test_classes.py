import json

import numpy as np
import pytest
import torch

from spatially.errors import UserError
from spatially.subject.classes import ClassNames, align, imagenet, read_class_map

ANIMALS = ClassNames(("cat", "dog", "crane", "crane"))


def test_union_of_classes_has_the_sum_of_their_probabilities():
    logits = torch.randn(5, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    found = align("m", ClassNames(), 4, ["b", "a"], [0, 1], {"a": [0, 2, 3], "b": 1})
    assert (found.rule, found.names, found.members) == ("class_map", ("b", "a"), ((1,), (0, 2, 3)))
    probabilities = logits.softmax(1)
    expected = torch.stack([probabilities[:, 1], probabilities[:, [0, 2, 3]].sum(1)], dim=1)
    torch.testing.assert_close(found(logits).softmax(1), expected)
    torch.testing.assert_close(found(logits)[:, 1], logits[:, [0, 2, 3]].exp().sum(1).log())


def test_gradients_pass_through_the_union():
    logits = torch.randn(2, 4, dtype=torch.float64, requires_grad=True)
    found = align("m", ClassNames(), 4, ["a", "b"], [0], {"a": [0, 2, 3], "b": 1})
    with torch.inference_mode():
        found(logits)  # must leave nothing behind that has no gradients
    assert torch.autograd.gradcheck(found, (logits,))
    assert torch.autograd.gradgradcheck(found, (logits,))


def test_map_by_name_and_synset():
    found = align("m", imagenet(1000), 1000, ["fish", "bird"], [0], {"fish": ["tench", "n01443537"], "bird": "hen"})
    assert found.members == ((0, 1), (8,))


def test_map_of_numbered_labels():
    found = align("m", ClassNames(), 4, None, [0, 1], {"1": 3, "0": [1, 2]})
    assert found.members == ((1, 2), (3,))


@pytest.mark.parametrize(
    ("classes", "class_map", "message"),
    [
        (["a", "b"], {"a": 1}, "no entry for 'b'"),
        (["a"], {"a": 1, "z": 2}, "'z' not among the classes of the data"),
        (["a"], {"a": 4}, "'a: 4' — must be indices from 0 to 3"),
        (["a"], {"a": [0, -1]}, "must be indices from 0 to 3"),
        (["a"], {"a": "horse"}, "'a: horse'"),
        (["a"], {"a": "crane"}, "'a: crane'"),
        (None, {"a": 1}, "no names: use 0, 1, 2"),
    ],
)
def test_wrong_maps_are_listed(classes, class_map, message):
    with pytest.raises(UserError, match=message):
        align("m", ANIMALS, 4, classes, [0], class_map)


def test_maps_are_read_from_json(tmp_path):
    path = tmp_path / "map.json"
    path.write_text(json.dumps({"a": [1, 2], "b": "cat"}), encoding="utf-8")
    assert read_class_map(path) == {"a": [1, 2], "b": "cat"}
    path.write_text("{", encoding="utf-8")
    with pytest.raises(UserError, match="is not JSON"):
        read_class_map(path)
    with pytest.raises(UserError, match="cannot be read"):
        read_class_map(tmp_path / "none.json")


@pytest.mark.parametrize("content", [{}, [1], {"a": 1.5}, {"a": []}, {"a": True}, {"a": [[1]]}])
def test_other_shapes_of_maps_are_refused(content):
    with pytest.raises(UserError, match="class_map"):
        read_class_map(content)


def test_plain_labels_are_indices():
    found = align("m", ANIMALS, 4, None, torch.tensor([0, 3]))
    assert (found.rule, found.names, found.members) == ("identity", ANIMALS.names, None)
    with pytest.raises(UserError, match=r"labels: must be from 0 to 3, .*got -1 to 7"):
        align("m", ANIMALS, 4, None, np.array([-1, 7]))


def test_synset_folders():
    synsets = imagenet(1000).synsets
    assert align("m", imagenet(1000), 1000, synsets, [999]).rule == "identity"
    found = align("m", imagenet(1000), 1000, ["n01443537", "n01440764"], [0, 1])
    assert (found.rule, found.members) == ("synsets", ((1,), (0,)))
    logits = torch.arange(2000.0).view(2, 1000)
    assert found(logits).tolist() == [[1.0, 0.0], [1001.0, 1000.0]]
    with pytest.raises(UserError, match="labels: must be from 0 to 1"):
        align("m", imagenet(1000), 1000, ["n01443537", "n01440764"], [2])


@pytest.mark.parametrize("number", [1000, 11221, 11821, 21841, 21842, 21843])
def test_every_imagenet_knows_its_synsets(number):
    known = imagenet(number)
    assert len(known.names) == len(known.synsets) == number
    found = align("m", known, number, ["n01440764"], [0])
    assert known.synsets[found.members[0][0]] == "n01440764"


def test_names_match_whatever_their_capitals_and_underscores():
    found = align("m", ClassNames(("tree frog", "cat", "dog")), 3, ["Cat", "tree_frog"], [1])
    assert (found.rule, found.members) == ("names", ((1,), (0,)))


def test_numbered_folders_of_a_named_model_are_indices():
    # ImageNetV2 comes in folders "0" to "999", which sort as 0, 1, 10, 100, …
    folders = sorted(str(number) for number in range(1000))
    found = align("m", imagenet(1000), 1000, folders, [999])
    assert found.members[2] == (10,)
    assert align("m", ClassNames(), 1000, folders, [999]).rule == "identity"


def test_unknown_names_in_the_models_number_are_in_its_order():
    assert align("m", ClassNames(), 3, ["x", "y", "z"], [2]).rule == "identity"
    found = align("m", ClassNames(("a", "b", "c")), 3, ["x", "y", "z"], [2])
    assert (found.rule, found.members) == ("order", None)  # a guess, and told as one


@pytest.mark.parametrize(
    ("known", "answers", "classes", "message"),
    [
        (ClassNames(), 4, ["x", "y"], "2 classes, m answers in 4 .*--class-map FILE.*JSON"),
        (ClassNames(), 2, ["x", "y", "z"], "3 classes, m answers in 2: it cannot be measured"),
        (ANIMALS, 4, ["cat", "dog", "bird", "fish"], "no one class called 'bird', 'fish'"),
        (ANIMALS, 4, ["cat", "crane"], "no one class called 'crane'"),
        (ClassNames(), 0, ["x"], "no classifier"),
    ],
)
def test_what_cannot_be_matched_says_what_to_do(known, answers, classes, message):
    with pytest.raises(UserError, match=message):
        align("m", known, answers, classes, [0])
