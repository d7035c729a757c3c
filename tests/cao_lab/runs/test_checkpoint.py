import errno
import zipfile

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


def changed(path, change):
    """Change the state in a checkpoint as another program would."""
    content = torch.load(path, weights_only=True)
    change(content)
    torch.save(content, path)


@pytest.mark.parametrize(
    "change",
    [
        lambda content: content.pop("note"),
        lambda content: content.update(step=3),
        lambda content: content.update(step=2.0),
        lambda content: content.update(weights=torch.full((3,), 2.0).double()),
        lambda content: content.update(weights=torch.full((3, 1), 2.0)),
        lambda content: content["weights"].add_(1e-6),
        lambda content: content.pop("checksum"),
        lambda content: content.clear(),
    ],
)
def test_one_that_was_changed_is_passed_over(tmp_path, change):
    checkpoint.save(state(1), tmp_path)
    checkpoint.save(state(2), tmp_path)
    changed(checkpoint.current(tmp_path), change)
    warnings = []
    assert load(tmp_path, warnings.append)["step"] == 1
    assert "is not as it was saved; it is passed over" in warnings[0]


def test_the_checksum_sees_every_kind_of_tensor_and_number(tmp_path):
    content = {
        "half": torch.ones(2, 3, dtype=torch.bfloat16).T,
        "nothing": torch.empty(0),
        "number": torch.tensor(2.5),
        "mixed": [None, True, (1, -0.0, float("inf")), {1: "one"}],
    }
    checkpoint.save(content, tmp_path)
    assert load(tmp_path)["mixed"] == content["mixed"]


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


def deep(depth):
    value = ()
    for _ in range(depth):
        value = (value,)
    return value


def doubled(times):
    value = []
    for _ in range(times):
        value = [value, value]
    return value


def pickled(path, instructions):
    """Write a checkpoint whose pickle is given by its instructions."""
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("archive/data.pkl", instructions)
        archive.writestr("archive/version", "3\n")
        archive.writestr("archive/byteorder", "little")


@pytest.mark.parametrize(
    "write",
    [
        # Hashing a key recurses in C without a limit.
        lambda path: pickled(path, b"\x80\x02})" + b"\x85" * 200_000 + b"K\x01s."),
        lambda path: torch.save({"checksum": "x", "list": doubled(60)}, path),
        lambda path: torch.save({"checksum": "x", "key": {deep(40): 1}}, path),
        lambda path: torch.save([1], path),
    ],
    ids=["deep key", "doubling lists", "too deep", "no dict"],
)
def test_a_checkpoint_that_would_never_end_is_passed_over(tmp_path, write):
    write(checkpoint.current(tmp_path))
    warnings = []
    assert load(tmp_path, warnings.append) is None
    assert len(warnings) == 1


def test_code_in_a_checkpoint_does_not_run(tmp_path):
    torch.save({"payload": pytest.raises}, checkpoint.current(tmp_path))
    with pytest.raises(CheckpointError, match="damaged"):
        checkpoint.read(checkpoint.current(tmp_path))
