"""``plait train`` end to end: trains, reports, resumes on other ranks, stops, refuses."""

from __future__ import annotations

import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest

from running import command, environment, metrics_in, plait, write_text_and_config


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A folder with a finished run in ``plait-run-1``, and what it printed."""
    folder = tmp_path_factory.mktemp("trained")
    write_text_and_config(folder)
    done = plait("train", "tiny.json", folder=folder)
    assert done.returncode == 0, done.stderr
    return folder, done.stdout


@pytest.fixture
def at_step_4(trained: tuple[Path, str], tmp_path: Path) -> Path:
    """A copy of the run as it was after its first checkpoint."""
    folder = tmp_path / "copy"
    shutil.copytree(trained[0], folder)
    shutil.rmtree(folder / "plait-run-1" / "checkpoints" / "step-8")
    return folder


def test_a_run_writes_metrics_plot_sample_and_checkpoints(trained: tuple[Path, str]) -> None:
    run = trained[0] / "plait-run-1"
    metrics = metrics_in(run)
    assert [line["step"] for line in metrics] == list(range(9))
    assert [line["step"] for line in metrics if line["val_loss"] is not None] == [0, 4, 8]
    keys = {"step", "loss", "val_loss", "tokens_per_s", "memory_bytes"}
    assert all(line.keys() == keys for line in metrics)
    assert metrics[0]["val_loss"] == pytest.approx(5.545, abs=0.1)  # ln 256
    assert metrics[8]["val_loss"] < metrics[0]["val_loss"] - 0.5
    assert all(line["memory_bytes"] > 0 and line["tokens_per_s"] > 0 for line in metrics)
    assert (run / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert (run / "sample.txt").stat().st_size > 0
    assert sorted(path.name for path in (run / "checkpoints").iterdir()) == ["step-4", "step-8"]


def test_a_run_reports_what_it_did(trained: tuple[Path, str]) -> None:
    said = trained[1]
    for part in (
        "12 sequences of 16 bytes = 2 ranks x 1 x 6",
        "ZeRO stage 3, fp32",
        "AdamW, lr 0.01, schedule WarmupLR, gradients clipped to norm 1",
        "trained        8 steps in ",
        "held-out loss  ",
        "bigram counts  ",
        "memory of rank 0 at stage 3:",
        "metrics        plait-run-1/metrics.jsonl",
        "plot           plait-run-1/loss.png",
        "checkpoint     plait-run-1/checkpoints/step-8",
        "sample",
    ):
        assert part in said


@pytest.mark.parametrize(("ranks", "stage"), [(2, 3), (1, 0), (3, 1)])
def test_a_resumed_run_follows_the_curve_of_an_undisturbed_one(
    trained: tuple[Path, str], at_step_4: Path, ranks: int, stage: int
) -> None:
    stage_given = f"zero_optimization.stage={stage}"
    done = plait("train", "--resume", "--ranks", str(ranks), "--set", stage_given, folder=at_step_4)
    assert done.returncode == 0, done.stderr
    assert "resumed  plait-run-1/checkpoints/step-4, at step 4" in done.stdout
    undisturbed = metrics_in(trained[0] / "plait-run-1")
    resumed = metrics_in(at_step_4 / "plait-run-1")
    assert [line["step"] for line in resumed] == list(range(9))
    tolerance = 0.0 if (ranks, stage) == (2, 3) else 1e-5
    for key in ("loss", "val_loss"):
        before = [line[key] for line in undisturbed]
        after = [line[key] for line in resumed]
        for one, other in zip(before, after, strict=True):
            assert other == (one if one is None else pytest.approx(one, rel=tolerance, abs=0))


def test_a_resumed_run_with_error_feedback_is_the_undisturbed_one_to_the_bit(
    trained: tuple[Path, str], tmp_path: Path
) -> None:
    folder = tmp_path / "coded"
    shutil.copytree(trained[0], folder, ignore=lambda *_: ["plait-run-1"])
    keys = ("zero_quantized_weights=true", "zero_quantized_gradients=true")
    keys += ("zeropp_loco_param.err_beta=0.8",)
    given = [part for key in keys for part in ("--set", f"zero_optimization.{key}")]
    done = plait("train", "tiny.json", *given, folder=folder)
    assert done.returncode == 0, done.stderr
    run = folder / "plait-run-1"
    undisturbed = metrics_in(run)
    assert (run / "checkpoints" / "step-4" / "wire.safetensors").exists()
    shutil.rmtree(run / "checkpoints" / "step-8")
    done = plait("train", "--resume", folder=folder)
    assert done.returncode == 0, done.stderr
    resumed = metrics_in(run)
    assert [line["loss"] for line in resumed] == [line["loss"] for line in undisturbed]
    assert undisturbed[7]["loss"] != metrics_in(trained[0] / "plait-run-1")[7]["loss"]
    shutil.rmtree(run / "checkpoints" / "step-8")
    fewer = plait("train", "--resume", "--ranks", "1", folder=folder)
    assert fewer.returncode == 0, fewer.stderr
    assert "that of 2 ranks, and these are 1; it begins at zero again" in fewer.stderr


def test_accumulation_and_16_bit_parameters_train(trained: tuple[Path, str]) -> None:
    folder = trained[0]
    accumulated = plait(
        *("train", "tiny.json", "--set", "gradient_accumulation_steps=3"),
        *("--set", "run.folder=accumulated", "--ranks", "1", "--set", "run.steps=4"),
        folder=folder,
    )
    assert accumulated.returncode == 0, accumulated.stderr
    whole = metrics_in(folder / "plait-run-1")[:4]
    for one, other in zip(whole, metrics_in(folder / "accumulated"), strict=False):
        assert other["loss"] == pytest.approx(one["loss"], rel=1e-5)
    half = plait(
        *("train", "tiny.json", "--set", "bf16.enabled=true", "--set", "run.folder=half"),
        folder=folder,
    )
    assert half.returncode == 0, half.stderr
    last, reference = metrics_in(folder / "half")[8], metrics_in(folder / "plait-run-1")[8]
    assert last["val_loss"] == pytest.approx(reference["val_loss"], rel=0.05)


def test_torchrun_s_ranks_are_joined(trained: tuple[Path, str], tmp_path: Path) -> None:
    run = tmp_path / "joined"
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    python, *rest = command("train", "tiny.json", "--set", f"run.folder={run}")
    done = subprocess.run(
        [python, *torchrun, *rest],
        cwd=trained[0],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    launched = [line["loss"] for line in metrics_in(trained[0] / "plait-run-1")]
    assert [line["loss"] for line in metrics_in(run)] == launched
    assert done.stdout.count("held-out loss") == 1


def test_ctrl_c_stops_with_130_and_says_how_to_go_on(trained: tuple[Path, str]) -> None:
    folder = trained[0]
    endless = ("--set", "run.steps=1000000", "--set", "run.folder=stopped")
    process = subprocess.Popen(
        command("train", "tiny.json", *endless),
        cwd=folder,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    deadline = time.monotonic() + 240
    while not list((folder / "stopped" / "checkpoints").glob("step-*/index.json")):
        assert process.poll() is None, process.communicate()[1]
        assert time.monotonic() < deadline
        time.sleep(0.2)
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "plait: stopped by Ctrl-C; go on with: plait train --resume stopped" in said
    assert "Traceback" not in said


def test_a_checkpoint_of_another_model_fails_once_and_changes_nothing(at_step_4: Path) -> None:
    run = at_step_4 / "plait-run-1"
    before = (run / "metrics.jsonl").read_bytes()
    done = plait("train", "--resume", "--set", "model.hidden_size=16", folder=at_step_4)
    assert done.returncode == 1
    assert done.stderr.count("plait: rank ") == 1
    assert "embedding.weight" in done.stderr
    assert "Traceback" not in done.stderr
    assert (run / "metrics.jsonl").read_bytes() == before
    assert (run / "checkpoints" / "step-4" / "index.json").exists()


def test_a_loss_that_is_not_finite_ends_the_run_with_its_step(trained: tuple[Path, str]) -> None:
    done = plait(
        *("train", "tiny.json", "--set", "run.folder=diverged", "--set", "scheduler=null"),
        *("--set", "optimizer.type=SGD", "--set", "optimizer.params.lr=1e38"),
        folder=trained[0],
    )
    assert done.returncode == 1
    assert done.stderr.count("the loss is nan at step ") == 1
    assert "Traceback" not in done.stderr


def test_a_finished_run_says_that_nothing_is_left(trained: tuple[Path, str]) -> None:
    done = plait("train", "--resume", folder=trained[0])
    assert done.returncode == 0
    assert "is at step 8 of 8: nothing is left to train; go further with" in done.stderr
    assert len(metrics_in(trained[0] / "plait-run-1")) == 9
