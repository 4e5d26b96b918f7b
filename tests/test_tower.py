"""The vision tower against loops of float64 that share nothing with it, and the laws of its shapes and dtypes."""

from dataclasses import replace

import mlx.core as mx
import numpy as np
import pytest
from mlx import nn
from mlx.utils import tree_flatten

from dgemma.config import VisionConfig
from dgemma.errors import ImageError
from dgemma.formats import Format
from dgemma.matrices import PackedLinear
from dgemma.vision import VisionTower
from dgemma.vision.tower import ClippableLinear, axial_angles, rotate

CONFIG = VisionConfig(
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=24,
    patch_size=4,
    pooling_kernel_size=3,
    position_embedding_size=20,
    rms_norm_eps=1e-6,
    rope_theta=100.0,
    standardize=True,
    use_clipped_linears=False,
)


def positions(columns: int, rows: int) -> np.ndarray:
    return np.array([(x, y) for y in range(rows) for x in range(columns)], dtype=np.int32)


def weights_for(config: VisionConfig, seed: int = 0) -> dict[str, np.ndarray]:
    """Random weights for every tensor, float32; norms and scales around 1, clipping bounds that bite."""
    generator = np.random.default_rng(seed)
    weights = {}
    for name, value in tree_flatten(VisionTower(config).parameters()):
        drawn = generator.standard_normal(value.shape)
        if name.endswith(("_min", "_max")):
            drawn = (0.8 + 0.1 * drawn) * (1 if name.endswith("max") else -1)
        elif "norm" in name or name == "std_scale":
            drawn = 1 + 0.3 * drawn
        elif name.endswith(".weight"):
            drawn = drawn / value.shape[-1] ** 0.5
        weights[name] = np.asarray(drawn, dtype=np.float32)
    return weights


def tower_with(config: VisionConfig, weights: dict[str, np.ndarray], dtype=mx.float32) -> VisionTower:
    tower = VisionTower(config)
    tower.load_weights([(name, mx.array(value).astype(dtype)) for name, value in weights.items()], strict=True)
    return tower


def random_pixels(*shape: int, seed: int = 1) -> np.ndarray:
    return np.random.default_rng(seed).random(shape, dtype=np.float32)


# -- the brute force --------------------------------------------------------------------------------------------------


def brute_norm(x: np.ndarray, eps: float, weight=1.0) -> np.ndarray:
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * weight


def brute_turn(vector: np.ndarray, place: np.ndarray, theta: float) -> np.ndarray:
    """One head of one patch: pairs of numbers as complex ones, turned by x in the first half, by y in the second."""
    half, quarter = len(vector) // 2, len(vector) // 4
    out = vector.copy()
    for axis in (0, 1):
        for i in range(quarter):
            a, b = axis * half + i, axis * half + i + quarter
            turned = (vector[a] + 1j * vector[b]) * np.exp(1j * place[axis] * theta ** (-2 * i / half))
            out[a], out[b] = turned.real, turned.imag
    return out


def brute_linear(w: dict, name: str, x: np.ndarray) -> np.ndarray:
    if name + ".input_min" in w:
        x = np.clip(x, w[name + ".input_min"], w[name + ".input_max"])
    x = x @ w[name + ".linear.weight"].T
    if name + ".input_min" in w:
        x = np.clip(x, w[name + ".output_min"], w[name + ".output_max"])
    return x


def brute_attention(w: dict, name: str, c: VisionConfig, x: np.ndarray, places: np.ndarray) -> np.ndarray:
    heads = {}
    for kind in "qkv":
        rows = brute_linear(w, f"{name}.{kind}_proj", x).reshape(len(x), -1, c.head_dim)
        rows = brute_norm(rows, c.rms_norm_eps, 1.0 if kind == "v" else w[f"{name}.{kind}_norm.weight"])
        if kind != "v":
            rows = np.array([[brute_turn(h, p, c.rope_theta) for h in row] for row, p in zip(rows, places)])
        heads[kind] = rows
    out = np.zeros((len(x), c.num_attention_heads, c.head_dim))
    for h in range(c.num_attention_heads):
        kv = h * c.num_key_value_heads // c.num_attention_heads
        for n in range(len(x)):
            scores = np.exp(heads["k"][:, kv] @ heads["q"][n, h])
            out[n, h] = scores / scores.sum() @ heads["v"][:, kv]
    return brute_linear(w, f"{name}.o_proj", out.reshape(len(x), -1))


def brute_mlp(w: dict, name: str, x: np.ndarray) -> np.ndarray:
    gate = brute_linear(w, f"{name}.gate_proj", x)
    gelu = gate / 2 * (1 + np.tanh(np.sqrt(2 / np.pi) * (gate + 0.044715 * gate**3)))
    return brute_linear(w, f"{name}.down_proj", gelu * brute_linear(w, f"{name}.up_proj", x))


def brute_tower(w: dict, c: VisionConfig, pixels: np.ndarray, places: np.ndarray) -> np.ndarray:
    """pixels [N, P] of one picture -> [N / 9, D] in float64."""
    w = {name: value.astype(np.float64) for name, value in w.items()}
    table = w["patch_embedder.position_embedding_table"]
    x = (pixels.astype(np.float64) * 2 - 1) @ w["patch_embedder.input_proj.weight"].T
    x = x + np.array([table[0, px] + table[1, py] for px, py in places])
    for n in range(c.num_hidden_layers):
        at = f"encoder.layers.{n}."

        def norm(name, rows, at=at):
            return brute_norm(rows, c.rms_norm_eps, w[f"{at}{name}layernorm.weight"])

        x = x + norm("post_attention_", brute_attention(w, at + "self_attn", c, norm("input_", x), places))
        x = x + norm("post_feedforward_", brute_mlp(w, at + "mlp", norm("pre_feedforward_", x)))
    side, columns = c.pooling_kernel_size, places[:, 0].max() + 1
    sums = np.zeros((len(x) // side**2, c.hidden_size))
    for row, (px, py) in zip(x, places):
        sums[px // side + (columns // side) * (py // side)] += row
    pooled = sums / side**2 * np.sqrt(c.hidden_size)
    return (pooled - w["std_bias"]) * w["std_scale"] if c.standardize else pooled


# -- tests ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("grid", [(3, 3), (6, 3), (3, 9), (12, 6)])
@pytest.mark.parametrize("change", [{}, {"standardize": False}, {"use_clipped_linears": True}, {"pooling_kernel_size": 1}])
def test_equals_brute_force(grid, change):
    config = replace(CONFIG, **change)
    weights, places = weights_for(config), positions(*grid)
    pixels = random_pixels(len(places), 48)
    want = brute_tower(weights, config, pixels, places)
    got = np.array(tower_with(config, weights)(mx.array(pixels), places))
    assert got.shape == want.shape == (len(places) // config.pooling_kernel_size**2, 64)
    assert np.abs(got - want).max() <= 1e-5 * np.abs(want).max()


def test_clipping_bounds_bite():
    config = replace(CONFIG, use_clipped_linears=True)
    weights, places = weights_for(config), positions(3, 3)
    pixels = mx.array(random_pixels(9, 48))
    clipped = tower_with(config, weights)(pixels, places)
    free = {name: value for name, value in weights.items() if not name.endswith(("_min", "_max"))}
    assert not mx.allclose(clipped, tower_with(CONFIG, free)(pixels, places), rtol=1e-2)


def test_parameters_carry_the_checkpoints_names():
    names = set(dict(tree_flatten(VisionTower(replace(CONFIG, num_hidden_layers=1)).parameters())))
    layer = "encoder.layers.0."
    projections = [f"self_attn.{p}_proj" for p in "qkvo"] + [f"mlp.{p}_proj" for p in ("gate", "up", "down")]
    norms = ["input", "post_attention", "pre_feedforward", "post_feedforward"]
    assert names == {
        "patch_embedder.input_proj.weight",
        "patch_embedder.position_embedding_table",
        "std_bias",
        "std_scale",
        *(f"{layer}{p}.linear.weight" for p in projections),
        *(f"{layer}{n}_layernorm.weight" for n in norms),
        f"{layer}self_attn.q_norm.weight",
        f"{layer}self_attn.k_norm.weight",
    }
    assert not {n for n in dict(tree_flatten(VisionTower(replace(CONFIG, standardize=False)).parameters())) if "std" in n}


def test_a_batch_of_one_grid_is_each_picture_alone():
    tower, places = tower_with(CONFIG, weights_for(CONFIG)), positions(6, 9)
    pixels = mx.array(random_pixels(3, 54, 48))
    together = tower(pixels, places)
    assert together.shape == (3, 6, 64)
    for alone, row in zip(pixels, together):
        assert mx.allclose(tower(alone, mx.array(places)), row, rtol=1e-5, atol=1e-4)


def test_rotation_depends_on_the_distance_only():
    def product(a, b):
        cos, sin = (mx.array(t) for t in axial_angles(np.array([a, b], np.int32), 24, 100.0))
        x, y = rotate(mx.array(np.random.default_rng(0).standard_normal((1, 2, 1, 24)).astype(np.float32)), cos, sin)[0, :, 0]
        return float((x * y).sum())

    assert product((3, 5), (7, 1)) == pytest.approx(product((10, 14), (14, 10)), abs=1e-4)
    assert product((3, 5), (7, 1)) != pytest.approx(product((3, 5), (1, 7)), abs=1e-2)


@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float16])
def test_activations_take_the_weights_dtype(dtype, monkeypatch):
    pool = VisionTower._pool
    weights, places = weights_for(CONFIG), positions(6, 6)
    pixels = random_pixels(36, 48)
    inside = []
    monkeypatch.setattr(VisionTower, "_pool", lambda self, x, *grid: inside.append(x.dtype) or pool(self, x, *grid))
    got = tower_with(CONFIG, weights, dtype)(mx.array(pixels), places)
    want = brute_tower(weights, CONFIG, pixels, places)
    assert got.dtype == dtype and inside == [dtype]
    assert np.abs(np.array(got.astype(mx.float32)) - want).max() <= 0.1 * np.abs(want).max()


def test_clipping_bounds_of_another_dtype_do_not_raise_the_activations_to_it():
    linear = ClippableLinear(replace(CONFIG, use_clipped_linears=True), 8, 8)
    linear.linear.set_dtype(mx.bfloat16)  # the bounds stay in float32
    assert linear(mx.ones((2, 8), mx.bfloat16)).dtype == mx.bfloat16


def test_a_quantised_patch_projection_still_sees_the_pixels():
    """Pixels cast to the packed weight's uint32 would be zeros: another picture would then give the same tokens."""
    config = replace(CONFIG, patch_size=8, intermediate_size=128, head_dim=32)
    tower, places = tower_with(config, weights_for(config)), positions(3, 3)
    bright, dark = mx.array(random_pixels(9, 192)), mx.array(random_pixels(9, 192, seed=2) * 0.5)
    plain = tower(bright, places)
    nn.quantize(tower, group_size=64, bits=8)
    assert tower.patch_embedder.input_proj.weight.dtype == mx.uint32
    got = tower(bright, places)
    assert got.dtype == mx.float32
    assert float(mx.abs(got - plain).max()) < 0.05 * float(mx.abs(plain).max())
    assert float(mx.abs(got - tower(dark, places)).max()) > 0.2 * float(mx.abs(plain).max())


def gradient(columns: int, rows: int, side: int) -> np.ndarray:
    """Patches [N, 3 side²] of a picture that grows lighter from left to right, 0.1 to 0.9, and is the same in each row."""
    line = np.linspace(0.1, 0.9, columns * side, dtype=np.float32).reshape(columns, 1, side, 1)
    patches = np.broadcast_to(line, (columns, side, side, 3)).reshape(columns, -1)  # [columns, side * side * 3]
    return np.tile(patches, (rows, 1))


@pytest.mark.parametrize("bits, close", [(8, 0.01), (4, 0.15)])
@pytest.mark.parametrize("layers", [0, 2])
def test_a_quantised_patch_projection_sees_a_gradient(bits, close, layers):
    """mlx-vlm casts patches to the dtype of the projection's weight; packed, that is uint32, and shades become 0: grey."""
    config = replace(CONFIG, patch_size=8, num_hidden_layers=layers)
    weights, places = weights_for(config), positions(18, 3)
    tower, pixels = tower_with(config, weights), gradient(18, 3, 8)
    grey = np.full_like(pixels, 0.5)
    seen, plain_grey = (np.array(tower(mx.array(picture), places)) for picture in (pixels, grey))

    projection, format = tower.patch_embedder.input_proj.weight, Format(bits=bits, group_size=32)
    tower.patch_embedder.input_proj = packed = PackedLinear(projection.shape, format)
    packed.load_weights(list(format.pack(projection).items()))
    assert packed.weight.dtype == mx.uint32
    found, found_grey = (np.array(tower(mx.array(picture), places)) for picture in (pixels, grey))

    strength = np.abs(seen - plain_grey).max()
    assert np.abs(found - seen).max() < close * strength
    signal = found - found_grey  # of each column of soft tokens, dark to light
    assert np.abs(signal[[0, -1]]).max(axis=-1).min() > 0.5 * strength
    assert np.abs(np.diff(signal, axis=0)).max(axis=-1).min() > 0.2 * strength


def test_large_activations_survive_float16():
    """Times sqrt(D) the pooled rows pass 65,504; standardising in float32 brings them back."""
    weights = weights_for(CONFIG)
    weights["patch_embedder.position_embedding_table"] += 10_000
    weights["std_bias"][:] = 64_000  # float16 holds the bias, not the 160,000 that it is taken from
    weights["std_scale"][:] = 1e-4
    got = tower_with(CONFIG, weights, mx.float16)(mx.array(random_pixels(9, 48)), positions(3, 3))
    assert got.dtype == mx.float16 and bool(mx.isfinite(got).all())


def test_a_grid_beyond_the_table_is_refused():
    tower = VisionTower(replace(CONFIG, position_embedding_size=18))
    assert tower(mx.zeros((54, 48)), positions(18, 3)).shape == (6, 64)
    with pytest.raises(ImageError) as caught:
        tower(mx.zeros((63, 48)), positions(21, 3))
    assert str(caught.value) == (
        "an image of 21x3 patches; this checkpoint has positions for 18 a side: crop the image to a less elongated shape "
        "or choose a smaller image budget"
    )


@pytest.mark.parametrize("places", [positions(4, 3), positions(3, 4), positions(6, 6)[6:], positions(6, 6)[::-1]])
def test_positions_that_are_no_grid(places):
    with pytest.raises(ValueError, match="are not a grid of"):
        VisionTower(CONFIG)(mx.zeros((len(places), 48)), places)
