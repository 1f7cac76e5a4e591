import pytest
import torch
from torch import nn

from halfmatch.errors import UserError
from halfmatch.precision import Precision
from halfmatch.precision.casting import cast_model
from halfmatch.precision.emulation import EmulatedLinear
from halfmatch.precision.monitors import audit_matmuls, first_non_finite, probe_overflow

TOKENS = torch.arange(2, 14).view(2, 6)


def load(folder, precision):
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    cast_model(model, precision.compute, precision.fp32_modules, precision.emulate)
    return model


@pytest.mark.parametrize("emulate", ["always", "never"])
@pytest.mark.parametrize("name", ["bf16", "fp16", "fp32"])
def test_audit_finds_every_matmul_in_the_dtype_asked_for(tiny_model_folder, name, emulate):
    precision = Precision.named(name, emulate=emulate)
    report = audit_matmuls(load(tiny_model_folder, precision), precision, TOKENS)
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}[name]
    layers = [f"model.layers.{layer}" for layer in range(2)]
    linears = [
        f"{layer}.{part}"
        for layer in layers
        for part in [f"self_attn.{p}_proj" for p in "qkvo"] + [f"mlp.{p}_proj" for p in ("gate", "up", "down")]
    ]
    assert {*linears, "lm_head", *(f"{layer}.self_attn" for layer in layers)} <= report.keys()
    assert {report[linear] for linear in [*linears, "lm_head"]} == {dtype}


@pytest.mark.parametrize("emulate", ["always", "never"])
def test_audit_knows_the_modules_that_stay_in_fp32(tiny_model_folder, emulate):
    precision = Precision.named("bf16", emulate=emulate, fp32_modules=("lm_head", "norm"))
    report = audit_matmuls(load(tiny_model_folder, precision), precision, TOKENS)
    assert report["lm_head"] == torch.float32
    assert report["model.layers.0.mlp.up_proj"] == torch.bfloat16


@pytest.mark.parametrize("part", ["attention", "mlp"])
def test_audit_knows_layers_that_are_in_fp32_as_a_whole(tiny_model_folder, part):
    precision = Precision.named("bf16", emulate="always", fp32_modules=(part,))
    report = audit_matmuls(load(tiny_model_folder, precision), precision, TOKENS)
    dtypes = {"attention": report["model.layers.0.self_attn.q_proj"], "mlp": report["model.layers.0.mlp.up_proj"]}
    assert dtypes == {name: torch.float32 if name == part else torch.bfloat16 for name in dtypes}


def test_audit_knows_what_layers_in_fp32_round_their_inputs_to(tiny_model_folder):
    precision = Precision.named("bf16", fp32_modules=("between_matmuls",))
    model = load(tiny_model_folder, precision)
    assert audit_matmuls(model, precision, TOKENS)["model.layers.0.mlp.up_proj"] == torch.bfloat16
    with pytest.raises(UserError, match=r"computes in .*bfloat16.* instead of float16"):
        audit_matmuls(model, Precision.named("fp16", fp32_modules=("between_matmuls",)), TOKENS)


def test_audit_raises_where_the_whole_setting_was_lost(tiny_model_folder):
    model = load(tiny_model_folder, Precision.named("fp32"))
    with pytest.raises(UserError, match=r"layers\.0\.self_attn\.q_proj computes in float32 instead of float16"):
        audit_matmuls(model, Precision.named("fp16"), TOKENS)


@pytest.mark.parametrize("emulate", ["always", "never"])
def test_audit_raises_where_one_layer_differs(tiny_model_folder, emulate):
    precision = Precision.named("bf16", emulate=emulate)
    model = load(tiny_model_folder, precision)
    layer = model.model.layers[1].mlp
    odd = nn.Linear(96, 64, bias=False, dtype=torch.float16)
    layer.down_proj = EmulatedLinear(odd) if emulate == "always" else odd
    layer.down_proj.register_forward_pre_hook(lambda module, args: (args[0].half(),))
    layer.down_proj.register_forward_hook(lambda module, args, result: result.bfloat16())
    with pytest.raises(
        UserError, match=r"^[^;]*layers\.1\.mlp\.down_proj computes in .*float16.* instead of bfloat16$"
    ):
        audit_matmuls(model, precision, TOKENS)


def test_audit_leaves_no_hook_behind(tiny_model_folder):
    precision = Precision.named("bf16")
    model = load(tiny_model_folder, precision)
    before = [len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules()]
    audit_matmuls(model, precision, TOKENS)
    with first_non_finite(model):
        pass
    assert before == [len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules()]


class Chain(nn.Module):
    """Three layers of one weight each, all 1: x → x·up → ·scale → ·down."""

    def __init__(self):
        super().__init__()
        self.up, self.middle, self.down = (nn.Linear(1, 1, bias=False) for _ in range(3))
        for parameter in self.parameters():
            nn.init.ones_(parameter)

    def forward(self, x):
        return self.down(self.middle(self.up(x)))


def test_the_first_module_to_overflow_is_named():
    model = Chain().half()
    model.middle.weight.data.fill_(60000)
    with first_non_finite(model) as finding:
        model(torch.full((1, 1), 2.0, dtype=torch.float16)).sum().backward()
    assert finding.name == "output of middle"


def test_a_weight_that_is_not_finite_comes_first():
    model = Chain()
    model.down.weight.data.fill_(float("nan"))
    with first_non_finite(model) as finding:
        model(torch.ones(1, 1))
    assert finding.name == "weight down.weight"


def test_an_overflow_of_the_backward_pass_alone_is_named():
    model = Chain().half()
    model.up.weight.data.fill_(1 / 256)
    model.middle.weight.data.fill_(256)
    with first_non_finite(model) as finding:
        (model(torch.ones(1, 1, dtype=torch.float16)).float().sum() * 1024).backward()
    assert finding.name == "gradient of the output of up"  # 1024 · 256; forward, all are 1 or less


def test_nothing_is_named_where_all_is_finite():
    model = Chain()
    with first_non_finite(model) as finding:
        model(torch.ones(1, 1)).sum().backward()
    assert finding.name is None


def test_overflow_probe_names_the_activation(tiny_model_folder):
    model = load(tiny_model_folder, Precision.named("fp16"))
    probe_overflow(model, TOKENS, "fp16")
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight.fill_(40000)
        model.model.layers[1].post_attention_layernorm.weight.fill_(40000)
    with pytest.raises(UserError, match=r"layers\.1\.post_attention_layernorm|layers\.1\.mlp.* is not finite in fp16"):
        probe_overflow(model, TOKENS, "fp16")
