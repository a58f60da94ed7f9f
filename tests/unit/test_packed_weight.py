"""Packed weights against the references they take the place of: the same numbers bit for bit, and
products with the arithmetic that csrc/matmul.h describes, at every level this CPU can run and by
emulated tiles."""

import shutil
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from parallel.groups import Placement, SingleRank
from parallel.packed_weight import PackedWeight, can_pack, pack_weights
from parallel.weight_formats import GROUP_SIZE, make_weight

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")

PLACEMENT = Placement(group=SingleRank(), dtype=torch.float32, device=torch.device("cpu"))
FORMATS = {
    "float32": (torch.float32, None),
    "bfloat16": (torch.bfloat16, None),
    "int8": (torch.float32, "int8"),
    "int4": (torch.float32, "int4"),
    "int8-bfloat16": (torch.bfloat16, "int8"),
    "int4-bfloat16": (torch.bfloat16, "int4"),
}
each_format = pytest.mark.parametrize("format", FORMATS)


class Stored:
    """A stored tensor in memory."""

    def __init__(self, tensor):
        self.tensor = tensor
        self.shape = tuple(tensor.shape)

    def read(self, rows, columns=None):
        return self.tensor[rows] if columns is None else self.tensor[rows, columns]


@pytest.fixture(scope="module")
def library(kernel_library):
    return kernel_library


@pytest.fixture(autouse=True)
def threads():
    """Sets the number of threads; the one before comes back."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


def reference(format, out_features, in_features, seed=0):
    """A loaded weight that is not packed."""
    dtype, quantization = FORMATS[format]
    placement = replace(PLACEMENT, dtype=dtype, quantization=quantization)
    weight = make_weight(out_features, in_features, placement=placement)
    values = normals(out_features, in_features, seed=seed) * 0.1
    weight.load(Stored(values), range(out_features))
    return weight


def normals(*shape, seed=1):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def everything(weight):
    return weight.rows(torch.arange(weight.out_features))


def exact_values(format, out_features, in_features):
    """Of `reference`: its rows() rounds dequantised numbers to bfloat16, a product does not."""
    quantization = FORMATS[format][1]
    return everything(reference(quantization or format, out_features, in_features))


def inputs(format, *shape, seed=1):
    return normals(*shape, seed=seed).to(FORMATS[format][0])


def rounded_inputs(format, x):
    """[rows, in_features] float64: what a row becomes before it is multiplied."""
    if FORMATS[format][1] is None:
        return x.double()
    groups = x.float().numpy().reshape(len(x), -1, GROUP_SIZE)
    peaks = np.abs(groups).max(axis=-1, keepdims=True)
    codes = np.rint(groups * np.where(peaks > 0, np.float32(127) / np.maximum(peaks, 1e-30), 0))
    scaled = codes.astype(np.float64) * (peaks / np.float32(127)).astype(np.float64)
    return torch.from_numpy(scaled.reshape(x.shape))


def assert_exact(format, product, x, values, bias=None):
    """Each output is within float32's rounding of the sum of its terms, and is rounded once more to
    its own dtype."""
    left, right = rounded_inputs(format, x), values.double()
    expected, size = left @ right.T, left.abs() @ right.abs().T
    if bias is not None:
        expected, size = expected + bias.double(), size + bias.double().abs()
    rounding = 2**-8 if product.dtype == torch.bfloat16 else 0.0
    bound = 1e-6 * size + rounding * expected.abs()
    assert ((product.double() - expected).abs() <= bound).all()


def shapes(format):
    """(out_features, in_features) that the format can have and the kernels can multiply."""
    step = {"float32": 1, "bfloat16": 2}.get(format, GROUP_SIZE)
    widths = st.integers(1, 130 // step).map(lambda count: count * step)
    return st.tuples(st.integers(1, 100), widths)


# -- the numbers


@each_format
@pytest.mark.parametrize("out_features", [1, 31, 32, 33, 96])
def test_rows_are_the_references_bit_for_bit(library, format, out_features):
    weight = reference(format, out_features, 96)
    expected = everything(weight)
    packed = PackedWeight(weight, library)
    assert torch.equal(everything(packed), expected)
    some = torch.tensor([out_features - 1, 0, 0])
    assert torch.equal(packed.rows(some), expected[some])
    assert packed.rows(some).dtype == FORMATS[format][0]


@each_format
def test_full_panels_are_packed_where_they_are(library, format):
    weight = reference(format, 64, 32)
    before = {tensor.data_ptr() for tensor in weight.state_dict().values()}
    packed = PackedWeight(weight, library)
    assert {tensor.data_ptr() for tensor in packed.state_dict().values()} == before


# -- products


@each_format
@settings(deadline=None, max_examples=25)
@given(data=st.data(), num_rows=st.integers(1, 40), num_threads=st.integers(1, 3))
def test_product_is_the_documented_arithmetic(library, format, data, num_rows, num_threads):
    out_features, in_features = data.draw(shapes(format))
    packed = PackedWeight(reference(format, out_features, in_features), library)
    bias = (
        normals(out_features, seed=3).to(FORMATS[format][0]) if data.draw(st.booleans()) else None
    )
    torch.set_num_threads(num_threads)
    x = inputs(format, num_rows, in_features)
    product = packed.matmul(x, bias)
    assert product.dtype == x.dtype
    assert product.shape == (num_rows, out_features)
    assert_exact(format, product, x, exact_values(format, out_features, in_features), bias)


@each_format
def test_product_is_near_the_references(library, format):
    """Whose own rounding differs: 8 bits for a group's activations are half a percent."""
    weight = reference(format, 100, 256)
    x = inputs(format, 9, 256)
    expected = weight.matmul(x).float()
    error = (PackedWeight(weight, library).matmul(x).float() - expected).norm() / expected.norm()
    assert error < {"float32": 1e-6, "bfloat16": 4e-3}.get(format, 1.2e-2)


@each_format
def test_shapes_of_more_and_less_dimensions(library, format):
    packed = PackedWeight(reference(format, 40, 64), library)
    x = inputs(format, 6, 64)
    product = packed.matmul(x)
    assert torch.equal(packed.matmul(x.view(2, 3, 64)), product.view(2, 3, 40))
    assert torch.equal(packed.matmul(x[0]), product[0])
    assert packed.matmul(x[:0]).shape == (0, 40)
    strided = torch.stack((x, x), dim=-1)[..., 0]
    assert torch.equal(packed.matmul(strided), product)


# -- rows on their own


@each_format
def test_a_row_does_not_depend_on_its_neighbours_or_on_threads(library, format, threads):
    packed = PackedWeight(reference(format, 75, 96), library)
    x = inputs(format, 23, 96)
    threads(1)
    together = packed.matmul(x)
    for num_threads in (2, 3):
        threads(num_threads)
        assert torch.equal(packed.matmul(x), together)
    for count in (1, 2, 5, 6, 7, 13):
        for start in range(0, len(x), count):
            rows = slice(start, start + count)
            assert torch.equal(packed.matmul(x[rows]), together[rows])


@each_format
def test_what_is_no_number_stays_in_its_row(library, format):
    packed = PackedWeight(reference(format, 40, 96), library)
    x = inputs(format, 9, 96)
    clean = packed.matmul(x)
    x[1, 3] = torch.nan
    x[4, 95] = torch.inf
    x[7, 40] = -torch.inf
    spoiled = packed.matmul(x)
    bad = [1, 4, 7]
    good = [row for row in range(9) if row not in bad]
    assert not spoiled[bad].isfinite().any()
    assert torch.equal(spoiled[good], clean[good])


@each_format
def test_extreme_rows(library, format):
    """Nothing but zeros, nearly nothing, and large numbers beside small ones."""
    x = inputs(format, 4, 96)
    x[0] = 0
    x[1] *= 1e-20
    x[2, ::7] *= 1e6
    x[3] *= 1e30
    product = PackedWeight(reference(format, 40, 96), library).matmul(x)
    assert (product[0] == 0).all()
    assert_exact(format, product, x, exact_values(format, 40, 96))


# -- what is packed


def test_what_cannot_be_packed():
    assert not can_pack(reference("bfloat16", 8, 33))  # rows of half a word
    halves = replace(PLACEMENT, dtype=torch.float16)
    assert not can_pack(make_weight(8, 32, placement=halves))
    elsewhere = replace(PLACEMENT, device=torch.device("meta"))
    assert not can_pack(make_weight(8, 32, placement=elsewhere))
    assert can_pack(reference("float32", 8, 33))
    assert can_pack(reference("int4", 3, 32))


def test_a_shared_weight_stays_shared(library):
    shared, own, odd = (reference("bfloat16", 8, size) for size in (32, 32, 33))
    model = torch.nn.ModuleDict(
        {
            name: torch.nn.ModuleDict({"weight": weight})
            for name, weight in (("embed", shared), ("head", shared), ("own", own), ("odd", odd))
        }
    )
    pack_weights(model, library)
    assert isinstance(model["own"]["weight"], PackedWeight)
    assert model["embed"]["weight"] is model["head"]["weight"]
    assert model["embed"]["weight"] is not model["own"]["weight"]
    assert model["odd"]["weight"] is odd
