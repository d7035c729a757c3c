import errno

import pytest
import torch

from cao_lab.runs import checkpoint
from cao_lab.runs.checkpoint import CheckpointError


def refuse(text):
    raise AssertionError(f"unexpected warning: {text}")


def flip_a_byte(path):
    content = bytearray(path.read_bytes())
    content[content.index(b"weights-go-here")] ^= 1
    path.write_bytes(content)


def load(folder, warn=refuse):
    return checkpoint.load(folder, warn, restore=lambda saved: saved)


def state(step):
    return {"step": step, "note": "weights-go-here", "weights": torch.full((3,), float(step))}


def test_a_state_comes_back_as_it_was(tmp_path):
    checkpoint.save(state(1), tmp_path)
    loaded = load(tmp_path)
    assert loaded["step"] == 1
    assert torch.equal(loaded["weights"], torch.ones(3))


def test_nothing_saved_is_nothing_loaded(tmp_path):
    assert load(tmp_path) is None


def test_the_one_before_is_kept(tmp_path):
    checkpoint.save(state(1), tmp_path)
    checkpoint.save(state(2), tmp_path)
    assert checkpoint.read(checkpoint.current(tmp_path))["step"] == 2
    assert checkpoint.read(checkpoint.previous(tmp_path))["step"] == 1


@pytest.mark.parametrize(
    "damage", [flip_a_byte, lambda p: p.write_bytes(p.read_bytes()[:-40]), lambda p: p.write_bytes(b"")]
)
def test_a_damaged_one_is_reported_and_passed_over(tmp_path, damage):
    checkpoint.save(state(1), tmp_path)
    checkpoint.save(state(2), tmp_path)
    damage(checkpoint.current(tmp_path))
    warnings = []
    assert load(tmp_path, warnings.append)["step"] == 1
    assert len(warnings) == 1
    assert "checkpoint.pt is damaged" in warnings[0]


def test_a_kill_between_the_two_renames_loses_nothing(tmp_path):
    checkpoint.save(state(1), tmp_path)
    checkpoint.current(tmp_path).rename(checkpoint.previous(tmp_path))
    assert load(tmp_path)["step"] == 1


def fill_the_disk(*_args, **_kwargs):
    raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize("writer", ["cao_lab.runs.checkpoint.torch.save", "cao_lab.runs.checkpoint.sync"])
def test_a_full_disk_leaves_the_old_one_intact_and_says_so(tmp_path, monkeypatch, writer):
    checkpoint.save(state(1), tmp_path)
    monkeypatch.setattr(writer, fill_the_disk)
    with pytest.raises(CheckpointError, match="the disk is full; the one before it is intact"):
        checkpoint.save(state(2), tmp_path)
    assert load(tmp_path)["step"] == 1
    assert not list(tmp_path.glob("*.new"))


@pytest.mark.parametrize("error", [KeyError("model"), TypeError("a\nb"), RuntimeError("size mismatch"), IndexError()])
def test_one_that_cannot_be_used_is_passed_over_in_one_line(tmp_path, error):
    checkpoint.save(state(1), tmp_path)
    checkpoint.save(state(2), tmp_path)

    def restore(saved):
        if saved["step"] == 2:
            raise error
        return saved["step"]

    warnings = []
    assert checkpoint.load(tmp_path, warnings.append, restore) == 1
    assert f"is not whole ({type(error).__name__}" in warnings[0]
    assert "\n" not in warnings[0]


def test_something_else_in_the_place_of_a_checkpoint_is_passed_over(tmp_path):
    torch.save([1], checkpoint.current(tmp_path))
    warnings = []
    assert load(tmp_path, warnings.append) is None
    assert "is not a checkpoint of a run" in warnings[0]


def test_code_in_a_checkpoint_does_not_run(tmp_path):
    torch.save({"payload": pytest.raises}, checkpoint.current(tmp_path))
    with pytest.raises(CheckpointError, match="damaged"):
        checkpoint.read(checkpoint.current(tmp_path))
