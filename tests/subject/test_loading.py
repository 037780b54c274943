import builtins
import shutil
import socket

import numpy as np
import pytest
import timm
import torch
import torchvision
from PIL import Image
from safetensors.torch import save_file
from timm.data import create_transform, resolve_model_data_config
from torch import nn

from spatially.errors import UserError
from spatially.subject import Subject, load


@pytest.fixture(scope="module")
def image() -> Image.Image:
    return Image.fromarray(np.random.default_rng(0).integers(0, 256, (260, 301, 3), dtype=np.uint8))


@pytest.fixture(autouse=True)
def no_network(monkeypatch):
    """The tests run the same with and without one."""

    def refuse(*arguments, **options):
        raise OSError("no network in tests")

    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    for name in ("http_proxy", "https_proxy", "all_proxy", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)


def answer(subject: Subject, image: Image.Image) -> torch.Tensor:
    with torch.no_grad():
        return subject(torch.from_numpy(subject.preprocessing.crop(image))[None].float() / 255)


def untrained(model, **options) -> Subject:
    return load(model, **{"pretrained": False, "device": "cpu", **options})


class Pooled(nn.Module):
    """The mean of each channel, three times."""

    def __init__(self, num_classes=9, channels=3):
        super().__init__()
        self.head = nn.Linear(channels, num_classes)

    def forward(self, images):
        return self.head(images.mean((2, 3)))


@pytest.mark.parametrize("name", ["resnet18.a1_in1k", "vit_tiny_patch16_224"])
def test_timm_models_answer_as_timm_does(image, name):
    subject = untrained(name)
    model = timm.create_model(name)
    model.load_state_dict(subject.model.state_dict())
    pixels = create_transform(**resolve_model_data_config(model), is_training=False)(image)
    with torch.no_grad():
        torch.testing.assert_close(answer(subject, image), model.eval()(pixels[None]), atol=1e-5, rtol=1e-5)
    assert (subject.name, subject.answers, subject.device.type) == (name, 1000, "cpu")
    assert subject.class_names[:3] == ("tench", "goldfish", "great white shark")
    assert not subject.model.training


def test_torchvision_models_answer_as_torchvision_does(image):
    subject = untrained("torchvision/resnet18")
    weights = torchvision.models.ResNet18_Weights.DEFAULT
    model = torchvision.models.resnet18()
    model.load_state_dict(subject.model.state_dict())
    with torch.no_grad():
        expected = model.eval()(weights.transforms()(image)[None])
    torch.testing.assert_close(answer(subject, image), expected, atol=1e-5, rtol=1e-5)
    assert subject.class_names == tuple(weights.meta["categories"])
    view = subject.align(["n01443537", "n01440764"], [0, 1])
    torch.testing.assert_close(answer(view, image), expected[:, [1, 0]], atol=1e-5, rtol=1e-5)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    transformers = pytest.importorskip("transformers")
    path = tmp_path_factory.mktemp("huggingface") / "tiny"
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    names = {0: "red", 1: "green", 2: "blue"}
    configuration = transformers.ViTConfig(image_size=32, patch_size=8, id2label=names, **sizes)
    torch.manual_seed(0)
    transformers.ViTForImageClassification(configuration).save_pretrained(path)
    transformers.ViTImageProcessor(size={"height": 32, "width": 32}).save_pretrained(path)
    return path


def test_huggingface_folders_answer_as_transformers_does(image, folder):
    import transformers

    subject = load(str(folder), device="cpu")
    processor = transformers.ViTImageProcessorPil.from_pretrained(folder)
    model = transformers.AutoModelForImageClassification.from_pretrained(folder).eval()
    with torch.no_grad():
        expected = model(torch.as_tensor(np.asarray(processor(image)["pixel_values"]))).logits
    torch.testing.assert_close(answer(subject, image), expected, atol=1e-5, rtol=1e-5)
    assert (subject.name, subject.answers, subject.class_names) == ("tiny", 3, ("red", "green", "blue"))
    assert subject.describe()["source"] == "huggingface"


def test_huggingface_without_weights_or_with_other_classes(folder):
    random = untrained(str(folder), num_classes=5)
    assert (random.answers, random.class_names) == (5, None)
    assert untrained(str(folder), num_classes=5).fingerprint == random.fingerprint
    trained = load(str(folder), num_classes=5, device="cpu")
    assert trained.answers == 5
    kept = load(str(folder), device="cpu").model.state_dict()
    name = "vit.embeddings.cls_token"
    assert torch.equal(trained.model.state_dict()[name], kept[name])


def test_huggingface_backbone_is_no_classifier(tmp_path, folder):
    import transformers

    transformers.ViTModel.from_pretrained(folder).save_pretrained(tmp_path / "backbone")
    with pytest.raises(UserError, match=r"no weights for classifier\.bias, classifier\.weight"):
        load(str(tmp_path / "backbone"), device="cpu")


def test_huggingface_without_a_readable_processor(tmp_path, folder):
    copy = tmp_path / "copy"
    shutil.copytree(folder, copy)
    (copy / "preprocessor_config.json").write_text("{", encoding="utf-8")
    with pytest.raises(UserError, match=r"image processor of .*copy .* cannot be read"):
        load(str(copy), device="cpu")
    (copy / "preprocessor_config.json").unlink()
    silent = load(str(copy), device="cpu").preprocessing
    assert (silent.input_size, silent.std, silent.normalisation) == ((32, 32), (1.0, 1.0, 1.0), "none given")


def test_huggingface_pickles_and_missing_repositories_are_refused(tmp_path, folder):
    copy = tmp_path / "pickled"
    copy.mkdir()
    (copy / "config.json").write_bytes((folder / "config.json").read_bytes())
    torch.save(load(str(folder), device="cpu").model.state_dict(), copy / "pytorch_model.bin")
    with pytest.raises(UserError, match=r"no weights for .*pickled"):
        load(str(copy), device="cpu")
    with pytest.raises(UserError, match="no weights for hf/nobody/nothing"):
        load("hf/nobody/nothing", device="cpu")


def test_huggingface_missing_package(monkeypatch):
    real = builtins.__import__

    def missing(name, *arguments, **options):
        if name == "transformers":
            raise ImportError(name)
        return real(name, *arguments, **options)

    monkeypatch.setattr(builtins, "__import__", missing)
    with pytest.raises(UserError, match=r'pip install "spatially\[hf\]"'):
        load("hf/google/vit", device="cpu")


def test_timm_folders(tmp_path):
    model = timm.create_model("resnet18", num_classes=7)
    timm.models.save_for_hf(model, tmp_path / "saved", model_config={"num_classes": 7}, safe_serialization=True)
    subject = load(str(tmp_path / "saved"), device="cpu")
    assert subject.answers == 7
    assert torch.equal(subject.model.fc.weight, model.fc.weight)


def test_callables_from_the_current_directory(image, tmp_path, monkeypatch):
    (tmp_path / "my_models.py").write_text(
        "from torch import nn\n"
        "def pooled(num_classes=9, bias=True):\n"
        "    return nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(3, num_classes, bias=bias))\n"
        "def number():\n"
        "    return 3\n",
        encoding="utf-8",
    )
    monkeypatch.chdir(tmp_path)
    subject = untrained("my_models:pooled", input_size=16, num_classes=5, model_options={"bias": False})
    assert (subject.name, subject.answers, subject.preprocessing.input_size) == ("my_models:pooled", 5, (16, 16))
    assert subject.model[-1].bias is None
    assert subject.describe()["preprocessing"]["normalisation"] == "none given"
    pixels = torch.from_numpy(subject.preprocessing.crop(image)).float() / 255
    torch.testing.assert_close(answer(subject, image), subject.model(pixels[None]))
    with pytest.raises(UserError, match=r"unknown callable in my_models 'poled': did you mean 'pooled'\?"):
        untrained("my_models:poled")
    with pytest.raises(UserError, match=r"must return a torch.nn.Module, got int"):
        untrained("my_models:number")
    with pytest.raises(UserError, match="there is no module not_there"):
        untrained("not_there.models:make")
    with pytest.raises(UserError, match="model_options: my_models:pooled does not take these"):
        untrained("my_models:pooled", model_options={"depth": 3})


def test_modules(image):
    model = Pooled()
    subject = load(model, input_size=(8, 12), mean=(0.5, 0.5, 0.5), std=(0.2, 0.2, 0.2), device="cpu")
    assert subject.model is model
    assert (subject.name, subject.answers, subject.class_names) == ("Pooled", 9, None)
    pixels = torch.from_numpy(subject.preprocessing.crop(image)).float() / 255
    torch.testing.assert_close(answer(subject, image), model((pixels[None] - 0.5) / 0.2))
    assert load(model, name="mine", input_size=8, device="cpu").describe()["model"] == "mine"
    assert load(timm.create_model("resnet18"), device="cpu").preprocessing.input_size == (224, 224)


def test_a_compiled_module_is_known_by_what_was_compiled(image):
    seen = []
    model = timm.create_model("resnet10t", num_classes=5)
    subject = load(torch.compile(model, backend=lambda graph, inputs: seen.append(graph) or graph), device="cpu")
    assert subject.model is model
    assert subject.compiled
    assert (subject.name, subject.answers, subject.preprocessing.crop_mode) == ("ResNet", 5, "center")
    assert not seen
    torch.testing.assert_close(answer(subject, image), answer(load(model, device="cpu"), image))
    assert seen


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "Pooled does not say which image size.*input_size=SIZE.*--input-size"),
        ({"input_size": 8, "num_classes": 4}, "num_classes: Pooled answers in 9 classes, got 4"),
        ({"input_size": 8, "num_classes": 0}, "num_classes: must be"),
        ({"input_size": 8, "model_options": {"a": 1}}, "model_options"),
        ({"input_size": 8, "dtype": "int8"}, "dtype: must be one of auto, float32"),
        ({"input_size": 8, "device": "tpu9"}, "device: must be auto"),
        ({"input_size": 8, "mean": (0.5,)}, "mean: must be three"),
        ({"input_size": 0}, "input_size: must be"),
    ],
)
def test_mistakes_with_modules(options, message):
    with pytest.raises(UserError, match=message):
        load(Pooled(), **{"device": "cpu", **options})


def test_models_that_cannot_take_the_images():
    with pytest.raises(UserError, match=r"Pooled cannot take RGB images of input_size \[8, 8\]"):
        load(Pooled(channels=1), input_size=8, device="cpu")
    with pytest.raises(UserError, match="in_chans must be 3"):
        untrained("resnet18", model_options={"in_chans": 1})


def test_random_weights_come_from_the_seed_alone():
    torch.manual_seed(5)
    state = torch.random.get_rng_state()
    first = untrained("resnet18")
    assert torch.equal(torch.random.get_rng_state(), state)
    torch.manual_seed(6)
    assert untrained("resnet18").fingerprint == first.fingerprint
    assert untrained("resnet18", seed=1).fingerprint != first.fingerprint
    assert first.describe()["weights"] == "random, seed 0"


def test_checkpoints_replace_pretrained_weights(tmp_path):
    model = timm.create_model("resnet18", num_classes=6)
    save_file(model.state_dict(), tmp_path / "mine.safetensors")
    subject = load("resnet18", checkpoint=tmp_path / "mine.safetensors", num_classes=6, device="cpu")
    assert torch.equal(subject.model.fc.weight, model.fc.weight)
    assert (subject.answers, subject.class_names) == (6, None)
    assert subject.describe()["weights"] == "checkpoint mine.safetensors"
    with pytest.raises(UserError, match=r"2 of another shape: fc\.weight \[6, 512\] instead of \[1000, 512\]"):
        load("resnet18", checkpoint=tmp_path / "mine.safetensors", device="cpu")
    with pytest.raises(UserError, match=r"is a file of weights; give the model's name and checkpoint="):
        load(str(tmp_path / "mine.safetensors"))


def test_other_input_sizes():
    assert untrained("resnet18.a1_in1k", input_size=96).preprocessing.resize == (101, 101)
    vit = untrained("vit_tiny_patch16_224", input_size=(64, 96), model_options={"depth": 1})
    assert vit(torch.rand(1, 3, 64, 96)).shape == (1, 1000)
    given = untrained("vit_tiny_patch16_224", model_options={"depth": 1, "img_size": 64})
    assert given.preprocessing.input_size == (64, 64)
    assert untrained("torchvision/resnet18", input_size=112).preprocessing.resize == (128, 128)
    with pytest.raises(UserError, match=r"torchvision/vit_b_16 cannot take RGB images of input_size \[64, 64\]"):
        untrained("torchvision/vit_b_16", input_size=64)


def test_a_model_without_a_classifier_has_no_answers(image):
    subject = untrained("resnet18", model_options={"num_classes": 0})
    assert subject.answers == 0
    assert answer(subject, image).shape == (1, 512)
    with pytest.raises(UserError, match="no classifier"):
        subject.align(None, [0])


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("resnet5o", "unknown model 'resnet5o': did you mean 'resnet50"),
        ("resnet18.a9_in1k", r"unknown model 'resnet18.a9_in1k': did you mean 'resnet18\.a"),
        ("torchvision/resnet81", "unknown model 'torchvision/resnet81': did you mean 'torchvision/resnet18'"),
        ("torchvision/maskrcnn_resnet50_fpn", "unknown model"),
        ("google/vit-base", r"unknown model 'google/vit-base'.*hf/REPO"),
    ],
)
def test_unknown_names(name, message):
    with pytest.raises(UserError, match=message):
        load(name, device="cpu")


def test_weights_that_are_not_here(monkeypatch, tmp_path):
    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    advice = "give checkpoint=FILE or pretrained=False .*--checkpoint FILE or --no-pretrained"
    for name in ("resnet18.a1_in1k", "vit_dwee_patch16_reg1_gap_256", "torchvision/resnet18"):
        with pytest.raises(UserError, match=f"no weights for {name} here.*{advice}"):
            load(name, device="cpu")
    with pytest.raises(UserError, match="num_classes: the weights of torchvision/resnet18 have 1000 classes, got 10"):
        load("torchvision/resnet18", num_classes=10, device="cpu")


def test_class_map_from_a_file(tmp_path, image):
    (tmp_path / "map.json").write_text('{"fish": [0, 1], "bird": "hen"}', encoding="utf-8")
    subject = untrained("resnet18", class_map=tmp_path / "map.json")
    view = subject.align(["bird", "fish"], [0, 1])
    logits = answer(subject, image)
    torch.testing.assert_close(answer(view, image), torch.stack([logits[:, 8], logits[:, :2].logsumexp(1)], dim=1))
