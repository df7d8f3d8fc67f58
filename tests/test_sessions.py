"""Calls that follow one another, each stage with its part of the state, against plain PyTorch."""

from __future__ import annotations

from pathlib import Path

import forked
import pytest
import torch
from loading import load_package
from session_models import Decoder, Listening, past_of

from gpipe_compiler.compile import CompileOptions, compile  # noqa: A004  # its name
from gpipe_compiler.errors import UsageError
from gpipe_compiler.frontend.subject import Subject
from gpipe_compiler.options import Constraints

RANKS = Path(__file__).parent / "helpers" / "session_ranks.py"


def compiled(folder, model, args, state, stages=2, **options):
    torch.manual_seed(0)
    subject = Subject("talks", model, args, training=False, state=state)
    options = CompileOptions(stages=stages, microbatches=2, training=False, **options)
    return compile(subject, options, folder).directory


@pytest.fixture(scope="module")
def decoder():
    torch.manual_seed(0)
    return Decoder().eval()


@pytest.fixture(scope="module")
def package(decoder, tmp_path_factory):
    """Of three stages, cut between layers."""
    torch.manual_seed(1)
    args = torch.randint(20, (2, 3)), past_of(2, 5)
    folder = tmp_path_factory.mktemp("sessions") / "decoder"
    cuts = Constraints(split_at=("layers.1", "layers.3"))
    return compiled(folder, decoder, args, {"past": "1"}, 3, constraints=cuts)


@torch.no_grad()
def plain(decoder, calls, past):
    """The logits of each call, of the model itself."""
    found = []
    for tokens in calls:
        logits, past = decoder(tokens, past)
        found.append(logits)
    return found


def close(found, expected):
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("samples", [1, 2, 5])
def test_token_by_token(package, decoder, samples):
    """A text of any length first, single tokens then; nothing was seen before."""
    calls = [torch.randint(20, (samples, new)) for new in (6, 1, 1, 3, 1)]
    with load_package(package).Pipeline() as pipe:
        pipe.eval()
        talk = pipe.session()
        found = [talk((tokens,)) for tokens in calls]
    assert all(state is None for _, state in found)
    close([logits for logits, _ in found], plain(decoder, calls, past_of(samples, 0)))


def test_sessions_do_not_meet_and_begin_with_what_they_are_given(package, decoder):
    one, other = ([torch.randint(20, (2, 1)) for _ in range(3)] for _ in range(2))
    seen = past_of(2, 4)
    with load_package(package).Pipeline(microbatches=1) as pipe:
        pipe.eval()
        first, second = pipe.session(), pipe.session()
        found = [[], []]
        for place, pair in enumerate(zip(one, other, strict=True)):
            found[0].append(first((pair[0],))[0])
            found[1].append(second((pair[1], seen) if place == 0 else (pair[1],))[0])
    close(found[0], plain(decoder, one, past_of(2, 0)))
    close(found[1], plain(decoder, other, seen))


def test_a_call_that_does_not_fit_leaves_the_state_as_it_was(package, decoder):
    calls = [torch.randint(20, (2, 2)) for _ in range(2)]
    with load_package(package).Pipeline() as pipe:
        pipe.eval()
        talk = pipe.session()
        found = [talk((calls[0],))[0]]
        for wrong, said in (
            ((torch.randint(20, (3, 1)),), "that of 2 samples, and this call has 3"),
            ((calls[1], past_of(2, 1)[:2]), "all of its state, or none"),
            ([(calls[1],)], "not a list of micro-batches"),
        ):
            with pytest.raises(Exception, match=said):
                talk(wrong)
        found.append(talk((calls[1],))[0])
    close(found, plain(decoder, calls, past_of(2, 0)))


def test_ranks_hold_their_own(package, decoder, tmp_path):
    calls = [torch.randint(20, (2, new)) for new in (4, 1, 1)]
    torch.save([(tokens,) for tokens in calls], tmp_path / "calls.pt")
    done = forked.run([RANKS, package, tmp_path], ranks=3)
    assert done.returncode == 0, done.stderr
    close(torch.load(tmp_path / "found.pt"), plain(decoder, calls, past_of(2, 0)))


def test_state_that_does_not_grow_is_given_at_first(tmp_path):
    torch.manual_seed(0)
    model = Listening().eval()
    args = torch.randn(2, 5, 6), torch.randn(1, 2, 8)
    folder = compiled(tmp_path / "listens", model, args, {"hidden": "hidden"})
    hidden, pieces = torch.randn(1, 3, 8), [torch.randn(3, 5, 6) for _ in range(3)]
    with load_package(folder).Pipeline() as pipe:
        pipe.eval()
        talk = pipe.session()
        with pytest.raises(Exception, match="pass it in the first call"):
            talk((pieces[0],))
        found = [talk((pieces[0], hidden))]
        found += [talk((piece,)) for piece in pieces[1:]]
    state = hidden
    for piece, said in zip(pieces, found, strict=True):
        with torch.no_grad():
            expected = model(piece, state)
        state = expected["hidden"]
        close([said["said"]], [expected["said"]])
        assert said["hidden"] is None


@pytest.mark.parametrize(
    ("state", "said"),
    [
        ({"memory": "hidden"}, "the model takes no memory"),
        ({"hidden": "memory"}, "the model returns no memory"),
        ({"hidden": "said"}, "cannot be the next hidden"),
    ],
)
def test_state_that_is_none_is_refused(state, said, tmp_path):
    args = torch.randn(2, 5, 6), torch.randn(1, 2, 8)
    with pytest.raises(UsageError, match=said):
        compiled(tmp_path / "listens", Listening().eval(), args, state)


def test_a_pipeline_without_state_has_no_session(tmp_path):
    args = torch.randn(2, 5, 6), torch.randn(1, 2, 8)
    folder = compiled(tmp_path / "listens", Listening().eval(), args, {})
    with load_package(folder).Pipeline() as pipe, pytest.raises(Exception, match="--state"):
        pipe.session()


class Alone(Listening):
    """Says something else of a single piece."""

    def forward(self, sound, hidden):
        found = super().forward(sound, hidden)
        return found if sound.shape[1] > 1 else {**found, "said": -found["said"]}


@pytest.mark.parametrize(("model", "least"), [(Decoder, []), (Alone, [2])])
def test_a_size_that_decides_is_no_smaller(model, least, tmp_path):
    torch.manual_seed(0)
    args = {
        Decoder: (torch.randint(20, (2, 3)), past_of(2, 5)),
        Alone: (torch.randn(2, 5, 6), torch.randn(1, 2, 8)),
    }[model]
    folder = compiled(tmp_path / "package", model().eval(), args, {})
    with load_package(folder).Pipeline() as pipe:
        first = pipe.spec.inputs[0].shape[1]
        found = [need.left for need in pipe.spec.requires if need.right == first]
    assert found == least


def test_stages_of_onnx_hold_no_state_of_a_torch_model(tmp_path):
    pytest.importorskip("onnxscript")
    args = torch.randn(2, 5, 6), torch.randn(1, 2, 8)
    with pytest.raises(UsageError, match="--state"):
        compiled(
            tmp_path / "listens",
            Listening().eval(),
            args,
            {"hidden": "hidden"},
            target="onnxruntime",
        )
