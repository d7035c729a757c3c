"""The page stands alone, and in a real browser its table agrees with the analysis."""

import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from pandas import DataFrame
from plotly.graph_objs.scatter import Marker
from selenium import webdriver
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.remote.webdriver import WebDriver
from selenium.webdriver.support.select import Select
from selenium.webdriver.support.wait import WebDriverWait
from synthetic_logs import ADAM, CAO, SGD, Run, decay, write_run, write_suite

from cao_lab.facts import CURVATURES
from cao_lab.reporting.analysis import ended_with_costs, first_epoch_below, time_to_threshold
from cao_lab.reporting.claims import audit
from cao_lab.reporting.logreader import Logs, load_logs
from cao_lab.reporting.matrix import task_title
from cao_lab.reporting.page import PLURAL, html_table, page
from cao_lab.reporting.page_data import FEWEST_POINTS, POINTS, SYMBOLS, page_data
from cao_lab.reporting.setting import settings
from cao_lab.reporting.tables import make_tables

FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync", "--disable-dev-shm-usage", "--window-size=1280,1000",
    "--force-prefers-reduced-motion",
)  # fmt: skip
TASK = "digits-mlp"


def demo_runs() -> list[Run]:
    methods = {"adam": (ADAM, 4.0), "cao-rank1": (CAO, 2.5), "cao-rank3": (CAO | {"rank": 3}, 2.0), "sgd": (SGD, 9.0)}
    full_batch = {"lbfgs": ({"name": "lbfgs", "lr": 1.0}, 3.0), "sgd-lr1": (SGD | {"lr": 1.0}, 3.5)}
    return [
        Run(
            decay(half_life, 20, 2.3, 0.03 * seed), label, seed, config, "demo", TASK, eigenvalues=[9.0, 4.0],
            steps_per_epoch=1 if label in full_batch else 40,
        )
        for label, (config, half_life) in (methods | full_batch).items()
        for seed in range(3)
    ]  # fmt: skip


def page_of(logs: Logs) -> str:
    found = settings(logs)
    return page(logs, found, make_tables(logs, found), audit(found), ["demo/digits-mlp/train-loss"])


@pytest.fixture(scope="module")
def logs(tmp_path_factory: pytest.TempPathFactory) -> Logs:
    folder = write_suite(tmp_path_factory.mktemp("logs"), demo_runs())
    (folder / "theory.csv").write_text("statement,bound,verdict\nLemma 1,0.5,holds\n")
    (folder / "bench.json").write_text(json.dumps([{"name": "step", "value": 1.5, "target": 2.0, "spread": 0.1}]))
    return load_logs(folder)


@pytest.fixture(scope="module")
def text(logs: Logs) -> str:
    return page_of(logs)


def test_the_page_asks_the_network_for_nothing(text: str) -> None:
    own = text[: text.index("plotly.js v")] + text[text.rindex('"use strict";') :]
    assert not re.findall(r"""(?:src|href)=["'](?:https?:)?//""", own)
    assert "<script src" not in text
    assert '<link rel="stylesheet"' not in text


def test_everything_has_its_place(text: str) -> None:
    for piece in ("Lemma 1", "1.5", "cao train adam --seed 0", "0123abc", "torch 2.x", 'id="table-time-to-threshold"'):
        assert piece in text
    assert "<!--" not in text[: text.index("plotly.js v")]


def test_the_matrix_shows_what_the_audit_found_and_leads_to_it(logs: Logs, text: str) -> None:
    verdicts = audit(settings(logs))
    body = text[text.index('<table class="matrix">') :]
    body = body[: body.index("</table>")]
    spoken = verdicts[~verdicts["verdict"].isin(["not tested here", "not testable here"])]
    assert body.count('class="badge') == len(spoken) > 0
    targets = set(re.findall(r'href="#(claim-[^"]+)"', body))
    assert targets <= set(re.findall(r'<div id="(claim-[^"]+)"', text))
    assert len(targets) == spoken["claim"].nunique()


def test_the_answer_says_what_it_counts(logs: Logs, text: str) -> None:
    verdicts = audit(settings(logs))
    counts = verdicts.loc[verdicts["is_counted"], "verdict"].value_counts()
    assert f"Of its {verdicts['claim'].nunique()} claims" in text
    told = {verdict: re.search(rf"(\d+) {words}[,.]", text) for verdict, words in PLURAL.items()}
    assert {str(verdict): int(found[1]) for verdict, found in told.items() if found} == {
        verdict: count for verdict, count in counts.items() if not verdict.startswith("not ")
    }
    assert any(told.values())


@pytest.mark.parametrize(
    ("task", "title"),
    [
        ("cifar100-resnet18w8-n5000", "CIFAR-100, ResNet-18 of width 8, 5,000 images"),
        ("cifar10-resnet34", "CIFAR-10, ResNet-34"),
        ("digits-linear-full-l2=0.001", "Digits, linear model, full batch, penalty 0.001"),
        ("my-own", "my-own"),
    ],
)
def test_a_task_has_a_title_that_people_read(task: str, title: str) -> None:
    assert task_title(task) == title


def test_cells_are_escaped() -> None:
    assert "<script>" not in html_table(DataFrame({"<b>": ["<script>"]}))


def test_a_hostile_label_stays_inside_the_data(tmp_path: Path) -> None:
    write_run(tmp_path, Run([3.0, 2.0], label="x", task="digits-mlp"))
    loaded = load_logs(tmp_path)
    loaded.epochs["name"] = "</script><script>alert(1)</script>"
    assert "</script>" not in page_data(settings(loaded))


@pytest.mark.parametrize("name", ["<!--plotly-->", "<!--<script>", "<!--data-->", "</SCRIPT >"])
def test_no_name_is_taken_for_a_mark_or_for_html(tmp_path: Path, name: str) -> None:
    loaded = load_logs(write_suite(tmp_path, [Run([3.0, 2.0], label="x", task="digits-mlp")]))
    loaded.epochs["name"] = name
    text = page_of(loaded)
    script = text[text.index('id="data">') + len('id="data">') : text.index("</script>")]
    assert "<" not in script
    assert json.loads(script)["settings"][0]["methods"][0]["name"] == name


def test_what_is_not_finite_is_null(tmp_path: Path) -> None:
    write_run(tmp_path, Run([3.0, float("inf")], status="diverged"))
    data = json.loads(page_data(settings(load_logs(tmp_path))))
    assert data["settings"][0]["runs"][0]["train_loss"] == [3.0, None]


def test_a_long_curve_keeps_its_ends_and_its_extremes(tmp_path: Path) -> None:
    losses = [*decay(500.0, 2000)]
    losses[900], losses[901] = 400.0, 0.001
    accuracies = [0.5] * 2000
    accuracies[1234] = 0.9
    runs = [Run(losses, seed=seed, accuracies=accuracies, eigenvalues=[9.0]) for seed in range(2)]
    (setting,) = json.loads(page_data(settings(load_logs(write_suite(tmp_path, runs)))))["settings"]
    (method,) = setting["methods"]
    for curve in (*setting["runs"], method["band"]["mean"]):
        assert len(curve["epoch"]) == len(curve["test_loss"]) <= POINTS + 10
        assert {400.0, 0.001, losses[0], losses[-1]} <= {*curve["train_loss"]}
        assert curve["epoch"][curve["test_accuracy"].index(0.9)] == 1235
    assert len(method["band"]["low"]["train_loss"]) == len(method["band"]["mean"]["epoch"])
    assert all(len(series["epoch"]) <= POINTS + 10 for one in setting["spectra"] for series in one["series"])


def test_curves_of_many_runs_share_the_points_of_a_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cao_lab.reporting.page_data.SEED_POINTS", 100)
    runs = [Run(decay(9.0, 60), seed=seed) for seed in range(4)]
    (setting,) = json.loads(page_data(settings(load_logs(write_suite(tmp_path, runs)))))["settings"]
    assert {len(run["epoch"]) for run in setting["runs"]} == {FEWEST_POINTS}


def test_methods_that_share_a_colour_have_markers_that_plotly_knows(tmp_path: Path) -> None:
    runs = [Run([3.0, 2.0], f"cao-rank{k}", 0, CAO | {"rank": k}, "demo", TASK) for k in range(1, 10)]
    methods = json.loads(page_data(settings(load_logs(write_suite(tmp_path, runs)))))["settings"][0]["methods"]
    assert [method["marker"] for method in methods] == [None] * 4 + ["square"] * 4 + ["triangle-up"]
    # Plotly's own check refuses a symbol that it does not know.
    assert [Marker(symbol=name).symbol for name in SYMBOLS.values()] == [*SYMBOLS.values()]


def test_epochs_of_several_iterations_have_no_mark(logs: Logs) -> None:
    (setting,) = json.loads(page_data(settings(logs)))["settings"]
    labels = [method["label"] for method in setting["methods"]]
    marks = {
        label: row["marks"] for label, row in zip(labels, setting["times"][setting["declared"]]["methods"], strict=True)
    }
    assert [label for label in labels if marks[label] and marks[label][0] is None] == ["lbfgs"]
    assert None not in marks["lbfgs"][1:]


@pytest.fixture(scope="module")
def browser(text: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[WebDriver]:
    chromium, driver = shutil.which("chromium"), shutil.which("chromedriver")
    if chromium is None or driver is None:
        pytest.skip("no chromium and chromedriver: the page was not tried in a browser")
    folder = tmp_path_factory.mktemp("browser")
    (folder / "index.html").write_text(text, encoding="utf-8")
    options = webdriver.ChromeOptions()
    options.binary_location = chromium
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    for flag in (*FLAGS, f"--user-data-dir={folder / 'profile'}"):
        options.add_argument(flag)
    found = webdriver.Chrome(options=options, service=Service(driver))
    found.get((folder / "index.html").as_uri())
    yield found
    found.quit()


def cells(browser: WebDriver) -> dict[str, list[str]]:
    rows = browser.find_elements(By.CSS_SELECTOR, "#times tbody tr")
    return {
        str(row.get_attribute("data-label")): [cell.text for cell in row.find_elements(By.TAG_NAME, "td")[1:]]
        for row in rows
    }


def expected(logs: Logs, threshold: float, baseline: str = "adam") -> dict[str, list[str]]:
    hits = first_epoch_below(ended_with_costs(logs.epochs, CURVATURES), [threshold])
    summary = time_to_threshold(hits, baseline).set_index("label")
    return {
        str(label): [
            f"{row['reached']} of {row['seeds']}",
            f"{row['epoch_mean']:.2f} ± {row['epoch_std']:.2f}" if row["reached"] else "not reached",
            f"{row['seconds_mean']:.1f} ± {row['seconds_std']:.1f}" if row["reached"] else "–",
            f"{row['gradient_cost_mean']:.0f} ± {row['gradient_cost_std']:.0f}" if row["reached"] else "–",
            *(
                f"{row[f'{unit}_speedup']:.2f}× [{row[f'{unit}_speedup_low']:.2f}, {row[f'{unit}_speedup_high']:.2f}]"
                if row[f"{unit}_speedup_pairs"] else "–"
                for unit in ("epoch", "seconds")
            ),
        ]
        for label, row in summary.iterrows()
    }  # fmt: skip


def threshold_of(browser: WebDriver) -> float:
    return float(str(browser.find_element(By.ID, "threshold").get_attribute("value")))


def test_the_table_agrees_with_the_analysis_at_the_declared_threshold(browser: WebDriver, logs: Logs) -> None:
    assert threshold_of(browser) == 0.1
    assert cells(browser) == expected(logs, 0.1)
    assert "declared before the runs" in browser.find_element(By.ID, "said").text


def test_moving_the_slider_moves_markers_and_table(browser: WebDriver, logs: Logs) -> None:
    before = markers(browser)
    slider = browser.find_element(By.ID, "slider")
    for _ in range(3):
        slider.send_keys(Keys.PAGE_DOWN)
    assert threshold_of(browser) > 0.1
    assert cells(browser) == expected(logs, threshold_of(browser))
    assert markers(browser) != before
    browser.find_element(By.ID, "declared").click()
    assert markers(browser) == before


def markers(browser: WebDriver) -> list[list[float]]:
    script = "return document.getElementById('chart').data.filter(t => t.mode === 'markers').map(t => [t.x[0], t.y[0]])"
    found: list[list[float]] = browser.execute_script(script)
    return found


def test_a_curve_can_be_switched_off_by_keyboard(browser: WebDriver) -> None:
    lines = "return document.getElementById('chart').data.length"
    before = browser.execute_script(lines)
    box = browser.find_element(By.CSS_SELECTOR, "#methods input")
    box.send_keys(Keys.SPACE)
    assert "adam" not in cells(browser)
    assert browser.execute_script(lines) < before
    box.send_keys(Keys.SPACE)
    assert "adam" in cells(browser)


def curves(browser: WebDriver, name: str) -> list[tuple[list[float], list[float]]]:
    script = "return document.getElementById('chart').data.filter(t => t.mode === 'lines' && t.name === arguments[0])"
    return [(trace["x"], trace["y"]) for trace in browser.execute_script(script, name)]


def test_the_mean_over_seeds_is_drawn_with_its_band(browser: WebDriver, logs: Logs) -> None:
    losses = logs.epochs[logs.epochs["label"] == "adam"].pivot_table("train_loss", "epoch", "seed").to_numpy()
    mean, std = losses.mean(axis=1), losses.std(axis=1, ddof=1)
    (_, low), (_, high), (x, center) = curves(browser, "Adam")
    assert x == list(range(1, 21))
    assert center == pytest.approx(mean, rel=1e-6)
    assert low == pytest.approx(np.maximum(mean - std, losses.min(axis=1)), rel=1e-5)
    assert high == pytest.approx(mean + std, rel=1e-5)


def test_where_a_seed_is_left_out_the_others_are_drawn_one_by_one(browser: WebDriver, logs: Logs) -> None:
    box = browser.find_elements(By.CSS_SELECTOR, "#seeds input")[2]
    box.click()
    own = logs.epochs[logs.epochs["label"] == "adam"]
    assert [y for _, y in curves(browser, "Adam")] == [
        own[own["seed"] == seed]["train_loss"].tolist() for seed in (0, 1)
    ]
    assert cells(browser) == expected(logs, 0.1)
    box.click()


def test_a_threshold_that_is_typed_in_goes_to_the_nearest_stop(browser: WebDriver, logs: Logs) -> None:
    box = browser.find_element(By.ID, "threshold")
    box.clear()
    box.send_keys("0.299", Keys.ENTER)
    assert threshold_of(browser) == 0.3
    assert cells(browser) == expected(logs, 0.3)
    browser.find_element(By.ID, "declared").click()


def test_the_speedup_is_over_whom_one_asks_for(browser: WebDriver, logs: Logs) -> None:
    choice = Select(browser.find_element(By.ID, "baseline"))
    choice.select_by_visible_text("CAO k=1")
    assert cells(browser) == expected(logs, 0.1, "cao-rank1")
    choice.select_by_visible_text("Adam")


def axes(browser: WebDriver) -> list[str]:
    script = "const {xaxis, yaxis} = document.getElementById('chart').layout;"
    found: list[str] = browser.execute_script(script + "return [xaxis.title.text, yaxis.title.text, yaxis.type]")
    return found


def test_axes_follow_the_choices(browser: WebDriver) -> None:
    assert axes(browser) == ["epochs", "train loss", "log"]
    Select(browser.find_element(By.ID, "unit")).select_by_value("seconds")
    Select(browser.find_element(By.ID, "quantity")).select_by_value("test_accuracy")
    browser.find_element(By.ID, "log").click()
    assert axes(browser) == ["seconds of training", "test accuracy", "linear"]


VIEW = {"quantity": "test_loss", "unit": "seconds", "baseline": "2", "watched": "2"}


def view_of(browser: WebDriver) -> dict[str, object]:
    script = "const value = one => one.type === 'checkbox' ? one.checked : one.value;"
    script += "const all = names => [...document.querySelectorAll(names)].map(value);"
    script += "return all('.controls select, .controls input, #threshold').concat(all('.chips input'))"
    return {"controls": browser.execute_script(script), "axes": axes(browser), "cells": cells(browser)}


def test_a_link_keeps_the_chosen_view(browser: WebDriver) -> None:
    for name, value in VIEW.items():
        Select(browser.find_element(By.ID, name)).select_by_value(value)
    browser.find_element(By.CSS_SELECTOR, "#methods input").click()
    browser.find_elements(By.CSS_SELECTOR, "#seeds input")[1].click()
    browser.find_element(By.ID, "slider").send_keys(Keys.PAGE_DOWN)
    chosen, address = view_of(browser), str(browser.find_element(By.ID, "link").get_attribute("href"))
    WebDriverWait(browser, 10).until(lambda found: found.current_url == address)
    browser.get("about:blank")
    browser.get(address)
    assert view_of(browser) == chosen
    browser.execute_script("location.hash = arguments[0]", "#task=demo/digits-mlp")
    WebDriverWait(browser, 10).until(lambda _: threshold_of(browser) == 0.1)
    assert cells(browser).keys() == {"adam", "cao-rank1", "cao-rank3", "lbfgs", "sgd", "sgd-lr1"}


def test_going_dark_changes_the_colours_and_not_the_view(browser: WebDriver) -> None:
    ink = "return document.getElementById('chart').data.map(trace => trace.line && trace.line.color)"
    browser.find_element(By.CSS_SELECTOR, "#methods input").send_keys(Keys.SPACE)
    browser.execute_script("location.hash = 'audit'")
    before, colours = view_of(browser), browser.execute_script(ink)
    emulate = "Emulation.setEmulatedMedia"
    browser.execute_cdp_cmd(emulate, {"features": [{"name": "prefers-color-scheme", "value": "dark"}]})
    WebDriverWait(browser, 10).until(lambda found: found.execute_script(ink) != colours)
    assert view_of(browser) == before
    browser.execute_cdp_cmd(emulate, {"features": [{"name": "prefers-color-scheme", "value": "light"}]})
    # The page is drawn anew: a control found before that would be gone when it is used.
    WebDriverWait(browser, 10).until(lambda found: found.execute_script(ink) == colours)
    browser.find_element(By.CSS_SELECTOR, "#methods input").send_keys(Keys.SPACE)


def test_every_control_is_reached_by_the_tab_key(browser: WebDriver) -> None:
    browser.find_element(By.ID, "setting").send_keys("")
    wanted = {
        "setting",
        "quantity",
        "unit",
        "log",
        "single",
        "link",
        "all",
        "none",
        "slider",
        "threshold",
        "declared",
        "baseline",
    }
    active = "return document.activeElement.id"
    seen = {browser.execute_script("document.getElementById('setting').focus();" + active)}
    for _ in range(40):
        browser.switch_to.active_element.send_keys(Keys.TAB)
        seen.add(browser.execute_script(active))
    assert wanted <= seen


@pytest.mark.parametrize("width", [1280, 768, 390])
def test_a_window_that_is_narrowed_after_loading_cuts_nothing_off(browser: WebDriver, width: int) -> None:
    metrics = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 500}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    assert browser.execute_script("return document.documentElement.scrollWidth") <= width
    # The chart hides what does not fit, so the drawing itself has to.
    drawn = "return [...document.querySelectorAll('.chart .main-svg')].map(one => one.getBoundingClientRect().right)"
    WebDriverWait(browser, 10).until(lambda found: max(found.execute_script(drawn)) <= width)
    titles = (
        "return ['xtitle', 'ytitle'].map(name => document.querySelector(`#chart .${name}`).getBoundingClientRect())"
    )
    table = "return document.getElementById('times').getBoundingClientRect().right"
    assert browser.execute_script(table) <= width
    for box in browser.execute_script(titles):
        assert box["width"] > 0
        assert box["left"] >= 0
        assert box["right"] <= width


def test_the_browser_has_nothing_to_complain_about(browser: WebDriver) -> None:
    assert [entry["message"] for entry in browser.get_log("browser")] == []
