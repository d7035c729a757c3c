import math
from dataclasses import replace

import pytest
import torch
from small_cifar import write_small_cifar
from torch.utils._python_dispatch import TorchDispatchMode

import cao_lab.runs.loss as loss_module
import cao_lab.runs.training as training_module
from cao_lab.config import RunConfig
from cao_lab.optimizer_config import optimizer_configs
from cao_lab.runs import checkpoint
from cao_lab.runs.loss import BatchLoss, TrainingTask
from cao_lab.runs.methods.cao import CAOConfig
from cao_lab.runs.methods.first_order import AdaHessianConfig, AdamConfig, SGDConfig
from cao_lab.runs.methods.lbfgs import LBFGSConfig
from cao_lab.runs.training import Training, rate_factor
from cao_lab.tasks.data import batches, load
from cao_lab.tasks.problems import build_model


@pytest.fixture(scope="module")
def digits():
    return load("digits", train_samples=200)


def config(optimizer=None, **changes):
    defaults = {"epochs": 3, "train_samples": 200, "batch_size": 64, "width": 16}
    return RunConfig(optimizer or SGDConfig(), **{**defaults, **changes})


def train(config, dataset):
    """Train from the start and yield one record per epoch."""
    return Training(config, dataset).epochs()


def without_measurements(records):
    return [replace(record, train_seconds=0, peak_memory_mib=0) for record in records]


def test_an_epoch_is_what_a_plain_loop_does(digits):
    """The oracle is a loop written out with torch alone."""
    record = next(train(config(SGDConfig(lr=0.1, max_gradient_norm=None)), digits))
    model = build_model("mlp", digits, 16, 0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=5e-4)
    total, correct = 0.0, 0
    for inputs, targets in batches(digits, 64, seed=0, epoch=0):
        outputs = model(inputs)
        loss = torch.nn.functional.cross_entropy(outputs, targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        total += loss.item() * len(inputs)
        correct += int((outputs.argmax(1) == targets).sum())
    assert record.train_loss == pytest.approx(total / 200, rel=1e-12)
    assert record.train_accuracy == correct / 200


def test_rows_count_epochs_steps_and_gradients(digits):
    records = list(train(config(), digits))
    assert [(r.epoch, r.step, r.gradient_evaluations) for r in records] == [(1, 4, 4), (2, 8, 8), (3, 12, 12)]
    assert all(r.train_seconds > 0 and r.peak_memory_mib > 0 and r.peak_memory_source == "process" for r in records)


@pytest.mark.parametrize(
    "optimizer",
    [CAOConfig(rank=2, refresh_every=3, warm_start=True), AdaHessianConfig(), AdamConfig()],
    ids=lambda optimizer: optimizer.name,
)
@pytest.mark.parametrize("stop_at", [1, 4, 6])
def test_a_run_stopped_after_any_step_goes_on_bit_for_bit(digits, optimizer, stop_at, tmp_path):
    whole = without_measurements(train(config(optimizer), digits))

    def save_at_step(training):
        if training.progress.step == stop_at:
            torch.save(training.state_dict(), tmp_path / "state.pt")
            raise InterruptedError

    first = Training(config(optimizer), digits)
    seen = []
    with pytest.raises(InterruptedError):
        seen.extend(first.epochs(save_at_step))
    torch.rand(7)
    second = Training(config(optimizer), digits)
    second.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    rest = without_measurements(second.epochs())
    assert rest == whole[-len(rest) :]
    assert len(rest) == 3 - stop_at // 4 + (stop_at == 4)


@pytest.mark.parametrize("name", optimizer_configs())
def test_the_checkpoint_of_every_optimizer_comes_back_whole(digits, name, tmp_path):
    run = config(optimizer_configs()[name](), epochs=2, batch_size=None)
    first, second = Training(run, digits), Training(run, digits)
    records = first.epochs()
    next(records)
    checkpoint.save(first.state_dict(), tmp_path)
    rest = without_measurements(records)
    # AdaHessian draws from the stream that the checkpoint puts back.
    assert checkpoint.load(tmp_path, pytest.fail, restore=lambda state: second.load_state_dict(state) or True)
    assert without_measurements(second.epochs()) == rest


def test_cao_logs_its_eigenvalues_and_the_first_one_it_did_not_capture(digits):
    training = Training(config(CAOConfig(rank=2, refresh_every=4, power_iterations=30), epochs=1), digits)
    list(training.epochs())
    rows = training.new_refreshes
    assert [(row.step, row.index, row.is_captured) for row in rows] == [(0, 1, True), (0, 2, True), (0, 3, False)]
    assert {row.damping for row in rows} == {0.1}
    assert {row.hessian_products for row in rows} == {62}


def test_logged_eigenvalues_are_those_of_the_dense_hessian():
    """A linear model, so that the Hessian at the start is small enough to be taken whole by torch.func."""
    data = load("breast-cancer")
    run = config(CAOConfig(rank=1, power_iterations=50), dataset="breast-cancer", model="linear", batch_size=None)
    training = Training(replace(run, epochs=1, train_samples=None, precision="fp64", l2=0.5), data)
    list(training.epochs())
    model = build_model("linear", data, 16, 0).double()
    inputs, targets = next(batches(data, None, seed=0, epoch=0))
    names = [name for name, _ in model.named_parameters()]
    shapes = [p.shape for p in model.parameters()]
    flat = torch.cat([p.detach().reshape(-1) for p in model.parameters()])

    def objective(vector):
        parts = vector.split([shape.numel() for shape in shapes])
        params = {name: part.view(shape) for name, part, shape in zip(names, parts, shapes, strict=True)}
        outputs = torch.func.functional_call(model, params, inputs.double())
        return torch.nn.functional.cross_entropy(outputs, targets) + 0.25 * vector.square().sum()

    values = torch.linalg.eigvalsh(torch.func.hessian(objective)(flat))
    largest = values[values.abs().argsort(descending=True)[:2]].tolist()
    assert [row.eigenvalue for row in training.new_refreshes] == pytest.approx(largest, rel=1e-3)


def test_monitoring_watches_any_optimizer_and_changes_nothing_else(digits):
    plain = without_measurements(train(config(), digits))
    training = Training(config(monitor_curvature=2), digits)
    assert without_measurements(training.epochs()) == plain
    assert [(row.step, row.index) for row in training.new_refreshes] == [
        (0, 1), (0, 2), (4, 1), (4, 2), (8, 1), (8, 2),
    ]  # fmt: skip
    assert not any(row.is_captured for row in training.new_refreshes)


@pytest.mark.parametrize("curvature", ["hessian", "gauss-newton"])
def test_a_monitored_refresh_is_logged_once_whether_it_comes_before_the_forward_pass_or_after(digits, curvature):
    run = config(CAOConfig(rank=1, refresh_every=4), curvature=curvature, monitor_curvature=3, epochs=2)
    training = Training(run, digits)
    list(training.epochs())
    assert [(row.step, row.index) for row in training.new_refreshes] == [(s, i) for s in (0, 4) for i in (1, 2, 3)]


def test_gauss_newton_in_parts_is_positive(digits):
    run = config(CAOConfig(rank=2), curvature="gauss-newton", curvature_samples=128, curvature_part=32)
    training = Training(run, digits)
    list(training.epochs())
    assert all(row.eigenvalue > 0 for row in training.new_refreshes)


def test_hessian_over_more_samples_is_taken_in_parts(digits):
    whole, parts = (
        Training(config(CAOConfig(), epochs=1, curvature_samples=128, curvature_part=part), digits)
        for part in (128, 32)
    )
    list(whole.epochs())
    list(parts.epochs())
    found = [[row.eigenvalue for row in training.new_refreshes] for training in (whole, parts)]
    assert found[0] == pytest.approx(found[1], rel=1e-4)


@pytest.mark.parametrize(("samples", "sizes"), [(128, [32] * 4), (130, [26] * 5), (20, [20])])
def test_no_part_has_more_samples_than_asked_for(digits, samples, sizes):
    task = TrainingTask(config(CAOConfig(), curvature_samples=samples, curvature_part=32), digits, torch.device("cpu"))
    objective = BatchLoss(task, digits.train_inputs[:8].float(), digits.train_targets[:8], step=0)
    assert [len(inputs) for inputs, _ in objective._parts()] == sizes


@pytest.mark.parametrize("curvature", ["hessian", "gauss-newton"])
def test_the_layout_of_images_changes_nothing_but_speed(curvature, tmp_path, monkeypatch):
    write_small_cifar(tmp_path, "cifar10", train=20, test=10)
    images = load("cifar10", tmp_path)
    images = replace(images, **{name: getattr(images, name)[..., :8, :8] for name in ("train_inputs", "test_inputs")})
    optimizer = CAOConfig(rank=1, refresh_every=2, power_iterations=1)
    config = RunConfig(optimizer, "cifar10", "resnet18", 0, 1, width=8, batch_size=10, precision="fp64")
    config = replace(config, curvature=curvature)
    layouts = []
    last = loss_module.channels_last

    def noted(inputs, model):
        layouts.append(last(inputs, model).is_contiguous(memory_format=torch.channels_last))
        return last(inputs, model)

    monkeypatch.setattr(loss_module, "channels_last", noted)
    records = list(train(config, images))
    assert layouts
    assert all(layouts)
    for module in (training_module, loss_module):
        monkeypatch.setattr(module, "channels_last", lambda inputs, _: inputs)
    for record, plain in zip(records, train(config, images), strict=True):
        assert (record.train_loss, record.test_loss) == pytest.approx((plain.train_loss, plain.test_loss), rel=1e-8)


def test_divergence_ends_the_run_with_the_row_it_happened_in(digits):
    training = Training(config(SGDConfig(lr=1e30, max_gradient_norm=None), epochs=10), digits)
    records = list(training.epochs())
    assert training.progress.has_diverged
    assert len(records) == 1
    assert not math.isfinite(records[0].train_loss)


class ScalarReads(TorchDispatchMode):
    """Counts the numbers that the host asks a device for, one after the other."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("steps", [1, 3, 16])
def test_a_step_asks_the_device_for_no_number(digits, steps, monkeypatch):
    expected = next(train(config(), digits))
    monkeypatch.setattr(training_module, "steps_between_reads", lambda _: steps)
    training, counts = Training(config(), digits), []
    with ScalarReads() as reads:
        record = next(training.epochs(lambda _: counts.append(reads.count)))
    assert counts == [0, 0, 0, 0]
    assert without_measurements([record]) == without_measurements([expected])


def test_an_evaluation_asks_the_device_once(digits, monkeypatch):
    training = Training(config(SGDConfig()), digits)
    monkeypatch.setattr(training_module, "EVALUATION_BATCH", 100)
    inputs, targets = digits.test_inputs, digits.test_targets
    with torch.no_grad():
        outputs = training.model.eval()((inputs.float() - digits.mean.view(1, -1, 1, 1)) / digits.std.view(1, -1, 1, 1))
    loss, accuracy = torch.nn.functional.cross_entropy(outputs, targets), (outputs.argmax(1) == targets).float().mean()
    with ScalarReads() as reads:
        found = training.evaluate()
    assert reads.count == 0
    assert found == pytest.approx((loss.tolist(), accuracy.tolist()), rel=1e-5)


def test_a_divergence_that_is_read_late_is_saved_and_ends_the_run(digits, monkeypatch):
    monkeypatch.setattr(training_module, "steps_between_reads", lambda _: 16)
    training = Training(config(SGDConfig(lr=1e30, max_gradient_norm=None), epochs=10), digits)
    records = list(training.epochs())
    assert len(records) == 1
    assert not math.isfinite(records[0].train_loss)
    assert training.state_dict()["progress"]["has_diverged"]


def test_lbfgs_takes_several_gradients_a_step(digits):
    records = list(train(config(LBFGSConfig(max_iterations=5), batch_size=None), digits))
    assert records[-1].step == 3
    assert records[-1].gradient_evaluations >= 15
    assert records[-1].train_loss < records[0].train_loss


@pytest.mark.parametrize("precision", ["fp64", "bf16"])
@pytest.mark.parametrize("optimizer", [CAOConfig(), SGDConfig()], ids=lambda optimizer: optimizer.name)
def test_other_precisions_train(digits, precision, optimizer):
    records = list(train(config(optimizer, precision=precision, epochs=4), digits))
    assert records[-1].train_loss < records[0].train_loss


def test_regression_and_autoencoder_have_no_accuracy():
    for dataset, model in (("diabetes", "linear"), ("digits", "autoencoder")):
        record = next(train(config(dataset=dataset, model=model, train_samples=None), load(dataset)))
        assert record.train_accuracy is None
        assert record.test_accuracy is None


def test_l2_is_part_of_the_train_loss(digits):
    plain, penalised = (next(train(config(batch_size=None, l2=l2), digits)).train_loss for l2 in (0.0, 0.5))
    squares = sum(float(p.detach().square().sum()) for p in build_model("mlp", digits, 16, 0).parameters())
    assert penalised == pytest.approx(plain + 0.25 * squares, rel=1e-6)


@pytest.mark.parametrize(
    ("schedule", "factors"),
    [("constant", [1, 1, 1, 1]), ("cosine", [1, 0.853553, 0.5, 0.146447]), ("step", [1, 1, 0.1, 0.01])],
)
def test_schedules(schedule, factors):
    assert [rate_factor(schedule, step, 4) for step in range(4)] == pytest.approx(factors, rel=1e-5)


def test_the_rate_of_the_schedule_is_logged(digits):
    records = list(train(config(SGDConfig(lr=0.2), schedule="step", epochs=4), digits))
    assert [record.lr for record in records] == pytest.approx([0.2, 0.2, 0.02, 0.002])
