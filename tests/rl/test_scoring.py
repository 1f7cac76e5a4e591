from copy import deepcopy

import numpy as np
import pytest
import torch

from halfmatch.rl import scoring
from halfmatch.rl.batching import collate
from halfmatch.rl.scoring import response_logprobs, token_logprobs

EOS = 1
PROMPTS = [[2, 10, 3], [4], [5, 6, 7, 8, 9]]
RESPONSES = [[13, 14, 15, 11, EOS], [12, 13, 14, 15, 16, 17, 18], [11, EOS]]


@pytest.fixture
def model(tiny_model_folder):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(tiny_model_folder, dtype=torch.float32)


def reference(model, prompt, response, temperature):
    """Log-probs and entropies of one sequence, unpadded, straight from the definition."""
    logits = model(input_ids=torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1]
    probabilities = torch.softmax(logits / temperature, dim=-1)
    chosen = probabilities[torch.arange(len(response)), torch.tensor(response)]
    return chosen.log(), -(probabilities * probabilities.log()).sum(-1)


@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("chunk_elements", [2**24, 61])  # 61: three positions a chunk
def test_padded_batch_gives_the_definition_row_by_row(model, monkeypatch, temperature, chunk_elements):
    monkeypatch.setattr(scoring, "CHUNK_ELEMENTS", chunk_elements)
    batch = collate(PROMPTS, RESPONSES, {EOS})
    logp, entropy = token_logprobs(model, batch, temperature)
    assert logp.dtype == entropy.dtype == torch.float32
    assert not entropy.requires_grad
    exact = deepcopy(model).double()
    for row, (prompt, response) in enumerate(zip(PROMPTS, RESPONSES, strict=True)):
        expected_logp, expected_entropy = reference(exact, prompt, response, temperature)
        count = len(response)
        torch.testing.assert_close(logp[row, :count].double(), expected_logp, atol=2e-5, rtol=0)
        torch.testing.assert_close(entropy[row, :count].double(), expected_entropy, atol=2e-5, rtol=0)
        assert not logp[row, count:].any()
        assert not entropy[row, count:].any()


@pytest.mark.parametrize("chunk_elements", [2**24, 61])
def test_gradient_equals_autograd_through_log_softmax(model, monkeypatch, chunk_elements):
    monkeypatch.setattr(scoring, "CHUNK_ELEMENTS", chunk_elements)
    model.double()
    weights = torch.linspace(-1, 1, 21, dtype=torch.float64).view(3, 7)
    batch = collate(PROMPTS, RESPONSES, {EOS})
    (token_logprobs(model, batch, 0.7)[0] * weights).sum().backward()
    ours = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}

    model.zero_grad()
    for row, (prompt, response) in enumerate(zip(PROMPTS, RESPONSES, strict=True)):
        (reference(model, prompt, response, 0.7)[0] * weights[row, : len(response)]).sum().backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(ours[name], parameter.grad, msg=name)


def test_jacobian_of_the_selected_log_softmax_is_that_of_the_definition():
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(4, 5, generator=generator, dtype=torch.float64)
    targets = torch.tensor([4, 0, 1, 4])

    def selected(z):
        return scoring._SelectedLogSoftmax.apply(z.clone(), targets, 0.8)[0]

    def definition(z):
        return torch.log_softmax(z / 0.8, dim=-1)[torch.arange(4), targets]

    for number in range(4):  # a backward pass each, as there is only one of what was computed
        gradients = []
        for function in (selected, definition):
            leaf = logits.clone().requires_grad_()
            gradients.append(torch.autograd.grad(function(leaf)[number], leaf)[0])
        torch.testing.assert_close(*gradients, atol=1e-14, rtol=0)


def test_a_second_backward_pass_is_refused(model):
    logp, _ = token_logprobs(model, collate(PROMPTS, RESPONSES, {EOS}))
    logp.sum().backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        logp.sum().backward()


def test_16_bit_logits_are_widened_before_the_softmax():
    logits = (torch.randn(4, 20, generator=torch.Generator().manual_seed(0)) * 8).bfloat16()
    targets = torch.tensor([3, 7, 1, 0])
    leaf = logits.clone().requires_grad_()
    logp, entropy = scoring._SelectedLogSoftmax.apply(leaf.clone(), targets, 1.0)
    exact = torch.log_softmax(logits.double(), dim=-1)
    assert logp.dtype == torch.float32
    torch.testing.assert_close(logp.double(), exact.gather(1, targets[:, None])[:, 0], atol=1e-5, rtol=0)
    torch.testing.assert_close(entropy.double(), -(exact.exp() * exact).sum(-1), atol=1e-5, rtol=0)
    onehot = torch.nn.functional.one_hot(targets, 20)
    expected = (onehot - torch.softmax(logits.float(), -1)).bfloat16()
    logp.sum().backward()
    assert torch.equal(leaf.grad, expected)


def test_entropy_is_finite_where_a_token_has_probability_zero():
    logits = torch.tensor([[0.0, float("-inf"), 0.0]])
    _, entropy = scoring._SelectedLogSoftmax.apply(logits, torch.tensor([0]), 1.0)
    assert entropy.item() == pytest.approx(np.log(2))


def test_what_stands_behind_a_response_changes_no_bit_of_it(model):
    prompts, responses = [[2, 10, 3]] * 3, [[13, 14, 15, 16, 17, 11, EOS], [12] * 7, [9] * 7]
    kept, _ = token_logprobs(model, collate(prompts, responses, {EOS}))
    batch = collate(prompts, responses, {EOS})
    batch.input_ids[1:] = 5  # other rows
    changed, _ = token_logprobs(model, batch)
    assert torch.equal(kept[0], changed[0])
    assert not torch.equal(kept[1], changed[1])
    longer, _ = token_logprobs(model, collate([prompts[0], [5]], [responses[0], [7] * 40], {EOS}))
    torch.testing.assert_close(longer[0, :7], kept[0], atol=2e-6, rtol=0)


@pytest.mark.parametrize("budget", [1, 20, 1000])
def test_response_logprobs_keeps_the_order_whatever_the_micro_batches(model, budget):
    seen = []
    arrays = response_logprobs(
        model, PROMPTS, RESPONSES, temperature=0.6, micro_batch_tokens=budget, progress=seen.append
    )
    assert sum(seen) == 3
    exact = deepcopy(model).double()
    for array, prompt, response in zip(arrays, PROMPTS, RESPONSES, strict=True):
        assert array.dtype == np.float32
        assert array.shape == (len(response),)
        expected, _ = reference(exact, prompt, response, 0.6)
        np.testing.assert_allclose(array, expected.detach().numpy(), atol=2e-5)


def test_response_logprobs_scores_what_follows_a_stop_token_too(model):
    """The record is the record: cutting it is the business of whoever made it."""
    (array,) = response_logprobs(model, [[2]], [[13, EOS, 14]], micro_batch_tokens=100)
    assert array.shape == (3,)
