"""Decoders of transformers with their caches, against the plain model, token by token."""

from __future__ import annotations

import copy
import inspect

import pytest
import torch
from loading import load_package
from transformers import (
    DynamicCache,
    Gemma3TextConfig,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MambaConfig,
    MambaForCausalLM,
)

from gpipe_compiler.compile import CompileOptions, compile, trace  # noqa: A004  # its name
from gpipe_compiler.errors import ModelError
from gpipe_compiler.frontend.examples import check_tensors
from gpipe_compiler.frontend.subject import Subject
from gpipe_compiler.runtime.core.nest import leaves_of, tensors_of


def name_of_cache(kind):
    """What a class calls its cache, given and returned: transformers has other names since 5.24."""
    given = inspect.signature(kind.forward).parameters
    return next(own for own in ("cache", "past_key_values", "cache_params") if own in given)


PAST = name_of_cache(LlamaForCausalLM)
STATES = name_of_cache(MambaForCausalLM)


@pytest.fixture(scope="module")
def decoder():
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=50,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    return LlamaForCausalLM(config).eval()


@torch.no_grad()
def seen(decoder, samples, length):
    return getattr(decoder(torch.randint(50, (samples, length)), use_cache=True), PAST)


@pytest.fixture(scope="module")
def package(decoder, tmp_path_factory):
    past = seen(decoder, 2, 7)
    example = {"input_ids": torch.randint(50, (2, 3)), PAST: past, "use_cache": True}
    state = {PAST: PAST}
    subject = Subject("decodes", decoder, (), example, training=False, state=state)
    folder = tmp_path_factory.mktemp("caches") / "decodes"
    found = compile(
        subject, CompileOptions(stages=2, microbatches=2, training=False), folder
    ).directory
    assert past.get_seq_length() == 7  # the example is as it was
    return found


@torch.no_grad()
def test_a_session_is_generation(package, decoder):
    past = DynamicCache()
    with load_package(package).Pipeline() as pipe:
        pipe.eval()
        talk = pipe.session()
        tokens = torch.randint(50, (3, 5))
        for _ in range(4):
            expected = decoder(tokens, **{PAST: past}, use_cache=True).logits
            found = talk({"input_ids": tokens})
            torch.testing.assert_close(found.logits, expected, rtol=1e-5, atol=1e-6)
            assert getattr(found, PAST) is None
            tokens = expected[:, -1:].argmax(-1)


@torch.no_grad()
def test_caches_are_taken_and_given(package, decoder):
    """What the package returns goes on in the plain model, and back."""
    past = seen(decoder, 3, 4)
    own = copy.deepcopy(past)
    with load_package(package).Pipeline() as pipe:
        pipe.eval()
        for _ in range(3):
            tokens = torch.randint(50, (3, 1))
            expected = decoder(tokens, **{PAST: past}, use_cache=True)
            found = pipe({"input_ids": tokens, PAST: own})
            torch.testing.assert_close(found.logits, expected.logits, rtol=1e-5, atol=1e-6)
            own = getattr(found, PAST)
            assert isinstance(own, DynamicCache)
            assert own.get_seq_length() == past.get_seq_length()
        tokens = torch.randint(50, (3, 2))
        one = decoder(tokens, **{PAST: past}).logits
        other = decoder(tokens, **{PAST: own}).logits
    torch.testing.assert_close(other, one, rtol=1e-5, atol=1e-6)


@torch.no_grad()
def test_a_mask_grows_with_the_cache(tmp_path):
    """It is as long as what was seen and what is new: of one token too, and of the first."""
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=50, n_embd=32, n_layer=2, n_head=4, n_positions=32)
    decoder = GPT2LMHeadModel(config).eval()
    example = {
        "input_ids": torch.randint(50, (2, 3)),
        "attention_mask": torch.ones(2, 10, dtype=torch.long),
        PAST: seen(decoder, 2, 7),
        "use_cache": True,
    }
    state = {PAST: PAST}
    subject = Subject("decodes", decoder, (), example, training=False, state=state)
    options = CompileOptions(stages=2, microbatches=2, training=False)
    folder = compile(subject, options, tmp_path / "decodes").directory
    with load_package(folder).Pipeline() as pipe:
        pipe.eval()
        for length in (4, 1):
            past, talk = DynamicCache(), pipe.session()
            tokens = torch.randint(50, (3, length))
            mask = torch.ones(3, length, dtype=torch.long)
            if length > 1:
                mask[1, :2] = 0  # padded on the left
            for _ in range(3):
                call = {"input_ids": tokens, "attention_mask": mask}
                expected = decoder(**call, **{PAST: past}, use_cache=True).logits
                found = talk(call).logits
                torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
                tokens = expected[:, -1:].argmax(-1)
                mask = torch.cat((mask, torch.ones_like(tokens)), 1)


@torch.no_grad()
def test_states_of_a_state_space_model_go_on(tmp_path):
    """They are of one size, and the plain model writes into them."""
    torch.manual_seed(0)
    config = MambaConfig(vocab_size=50, hidden_size=32, num_hidden_layers=2, state_size=4)
    decoder = MambaForCausalLM(config).eval()

    def read(samples):
        return getattr(decoder(torch.randint(50, (samples, 5)), use_cache=True), STATES)

    past = read(2)
    example = {"input_ids": torch.randint(50, (2, 1)), STATES: past, "use_cache": True}
    before = [tensor.clone() for _, tensor in tensors_of(past)]
    subject = Subject("decodes", decoder, (), example, training=False, state={STATES: STATES})
    options = CompileOptions(stages=2, microbatches=2, training=False)
    folder = compile(subject, options, tmp_path / "decodes").directory
    assert all(map(torch.equal, before, [tensor for _, tensor in tensors_of(past)]))

    past = read(3)
    own, held = copy.deepcopy(past), copy.deepcopy(past)
    with load_package(folder).Pipeline() as pipe:
        pipe.eval()
        talk, begun = pipe.session(), {STATES: held}
        for _ in range(4):
            tokens = torch.randint(50, (3, 1))
            expected = decoder(tokens, **{STATES: past}, use_cache=True).logits
            found = pipe({"input_ids": tokens, STATES: own})
            own = getattr(found, STATES)
            assert isinstance(own, DynamicCache)
            said, begun = talk({"input_ids": tokens, **begun}).logits, {}
            for logits in (found.logits, said):
                torch.testing.assert_close(logits, expected, rtol=1e-5, atol=1e-6)
    tokens = torch.randint(50, (3, 2))
    one = decoder(tokens, **{STATES: past}).logits
    other = decoder(tokens, **{STATES: own}).logits
    torch.testing.assert_close(other, one, rtol=1e-5, atol=1e-6)


def test_a_cache_of_one_mode_alone_is_left_out_where_a_model_is_trained():
    """It is no tensor that training lacks, for which a call in training would be refused."""
    config = MambaConfig(vocab_size=9, hidden_size=8, num_hidden_layers=1)
    tokens = torch.randint(9, (4, 3))
    graph = trace(MambaForCausalLM(config), (), {"input_ids": tokens, "labels": tokens})

    assert not graph.left_out
    assert graph.outputs[STATES].is_left_out(training=True)
    assert not graph.outputs[STATES].is_left_out(training=False)


def test_a_cache_is_for_inference_alone(decoder):
    """Of training, `gradient_checkpointing_enable()` has none returned."""
    tokens = torch.randint(50, (4, 3))
    example = {"input_ids": tokens, "labels": tokens}
    checkpointed = copy.deepcopy(decoder)
    checkpointed.gradient_checkpointing_enable()

    for model in (decoder, checkpointed):
        graph = trace(copy.deepcopy(model), (), example)
        assert not graph.left_out
        assert len(graph.output_values) == 1
        assert graph.outputs[PAST].is_left_out(training=True) is (model is checkpointed)
        assert not graph.outputs[PAST].is_left_out(training=False)


def test_a_cache_that_was_reset_is_a_leaf():
    """Its states are those of no text, and it says beside them that there was none."""
    decoder = MambaForCausalLM(MambaConfig(vocab_size=9, hidden_size=8, num_hidden_layers=1))
    cache = getattr(decoder(torch.ones(1, 2, dtype=torch.long), use_cache=True), STATES)
    assert len(list(tensors_of(cache))) == 2
    cache.reset()
    assert not list(tensors_of(cache))


def test_a_cache_with_windows_is_a_leaf():
    """Its layers hold more than tensors: a package says what it was, and makes none."""
    kinds = ["sliding_attention", "full_attention"]
    config = Gemma3TextConfig(num_hidden_layers=2, layer_types=kinds, sliding_window=4)
    cache = DynamicCache(config=config)
    for layer in range(2):
        cache.update(torch.zeros(1, 1, 3, 2), torch.zeros(1, 1, 3, 2), layer)

    assert [leaf for _, leaf in leaves_of({"past": cache})] == [cache]
    given = {"input_ids": torch.ones(1, 1), "past": cache}
    with pytest.raises(ModelError, match="holds tensors inside of a DynamicCache"):
        check_tensors(given, "the example", None)
