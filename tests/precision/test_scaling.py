import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from halfmatch.precision import LossScaling
from halfmatch.precision.scaling import LossScaler


@given(
    overflows=st.lists(st.booleans(), max_size=120),
    initial=st.sampled_from([1.0, 3.0, 1000.0, 65536.0]),
    growth=st.floats(1.01, 4.0),
    backoff=st.floats(0.1, 0.99),
    interval=st.integers(1, 5),
)
def test_scale_moves_as_torch_moves_it(overflows, initial, growth, backoff, interval):
    theirs = torch.amp.GradScaler(
        "cpu", init_scale=initial, growth_factor=growth, backoff_factor=backoff, growth_interval=interval
    )
    ours = LossScaler(
        LossScaling(
            initial_scale=initial,
            growth_factor=growth,
            backoff_factor=backoff,
            growth_interval=interval,
            min_scale=1e-37,
            max_scale=1e38,
        )
    )
    weight = torch.zeros(1, requires_grad=True)
    optimizer = torch.optim.SGD([weight], lr=0.0)
    for overflow in overflows:
        weight.grad = torch.tensor([math.inf if overflow else 1.0])
        theirs.scale(weight.sum())  # torch makes its tensors on the first call
        theirs.step(optimizer)
        theirs.update()
        ours.update(overflow=overflow)
        if not 1e-36 < ours.factor < 1e37:
            return  # torch has no bounds
        assert ours.factor == theirs.get_scale()
        assert ours.steps_since_change == theirs._get_growth_tracker()


@given(st.lists(st.booleans(), max_size=60))
def test_scale_stays_within_its_bounds(overflows):
    scaler = LossScaler(LossScaling(initial_scale=8.0, growth_interval=1, min_scale=2.0, max_scale=64.0))
    for overflow in overflows:
        before = scaler.factor
        scaler.update(overflow=overflow)
        assert scaler.factor == (max(before / 2, 2.0) if overflow else min(before * 2, 64.0))
        assert scaler.at_minimum == (scaler.factor == 2.0)


def test_scaled_gradients_come_back_as_they_were():
    weight = torch.tensor([3.0, -5.0], requires_grad=True)
    scaler = LossScaler(LossScaling(initial_scale=4096.0))
    scaler.scale((weight**2).sum()).backward()
    assert weight.grad.tolist() == [6.0 * 4096, -10.0 * 4096]
    scaler.unscale([weight.grad])
    assert weight.grad.tolist() == [6.0, -10.0]


def test_scaling_saves_a_gradient_that_fp16_cannot_hold():
    tiny = 1e-8
    weight = torch.ones(1, dtype=torch.float16, requires_grad=True)
    (weight.float() * tiny).sum().backward()
    assert weight.grad.item() == 0.0
    weight.grad = None
    scaler = LossScaler(LossScaling())
    scaler.scale((weight.float() * tiny).sum()).backward()
    gradient = weight.grad.float()
    scaler.unscale([gradient])
    assert gradient.item() == pytest.approx(tiny, rel=1e-3)


def test_unscaling_16_bit_gradients_is_refused():
    with pytest.raises(TypeError, match="float32"):
        LossScaler(LossScaling()).unscale([torch.ones(1, dtype=torch.float16)])


def test_state_round_trips():
    first = LossScaler(LossScaling(growth_interval=3))
    for overflow in (True, False, True, False):
        first.update(overflow=overflow)
    second = LossScaler(LossScaling(growth_interval=3))
    second.load_state_dict(first.state_dict())
    for overflow in (False, False, True):
        first.update(overflow=overflow)
        second.update(overflow=overflow)
        assert (second.factor, second.steps_since_change) == (first.factor, first.steps_since_change)
