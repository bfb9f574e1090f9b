"""The callbacks record what ``stepscope run`` records, and leave the training as it is without them."""

import functools
import runpy

import pytest
import torch

from stepscope.watch.patches import installed

pytestmark = [
    pytest.mark.frameworks,
    pytest.mark.filterwarnings("ignore"),  # the libraries' own warnings are theirs
]


@pytest.fixture
def in_place(tmp_path, monkeypatch):
    """A folder for what the script writes; torch's settings are put back."""
    threads, state = torch.get_num_threads(), torch.get_rng_state()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    yield tmp_path
    torch.set_num_threads(threads)
    torch.set_rng_state(state)


def last_rows(callback):
    steps = callback.trace.steps
    return steps[steps["sync_gradients"].astype(bool)]


def assert_recorded_and_unchanged(callback, native, folder):
    rows = last_rows(callback)
    assert rows["optimizer"].unique().tolist() == ["AdamW/0"]
    assert rows["lr"].tolist() == [entry["learning_rate"] for entry in native.logged]
    assert rows["grad_norm"].tolist() == pytest.approx([entry["grad_norm"] for entry in native.logged], rel=1e-6)
    left, right = (torch.load(place / "final.pt", weights_only=True) for place in (native.folder, folder))
    assert all(torch.equal(left[key], right[key]) for key in left)
    assert callback.trace.meta["status"] == "complete"
    assert not installed()


def test_callback_of_the_hugging_face_trainer(both, script, in_place):
    native, _ = both("hf_trainer")
    from stepscope.integrations.huggingface import StepscopeCallback

    callback = StepscopeCallback()
    main = runpy.run_path(script("hf_trainer"))["main"]
    main.__globals__["Trainer"] = functools.partial(main.__globals__["Trainer"], callbacks=[callback])
    main()
    assert_recorded_and_unchanged(callback, native, in_place)
    assert callback.trace.meta["declared"] == {"accumulation_steps": 4, "total_steps": 6}


def test_callback_of_the_lightning_trainer(both, script, in_place, monkeypatch):
    native, _ = both("lightning_trainer")
    import lightning

    from stepscope.integrations.lightning import StepscopeCallback

    callback = StepscopeCallback(in_place / "trace", every=2)
    monkeypatch.setattr(lightning, "Trainer", functools.partial(lightning.Trainer, callbacks=[callback]))
    runpy.run_path(script("lightning_trainer"))["main"]()
    assert_recorded_and_unchanged(callback, native, in_place)
    assert callback.trace.meta["declared"] == {"accumulation_steps": 4}
    assert (in_place / "trace" / "meta.json").is_file()


def test_exception_in_a_lightning_fit_ends_the_recording(both, script, in_place, monkeypatch):
    both("lightning_trainer")
    import lightning

    from stepscope.integrations.lightning import StepscopeCallback

    class Stumbles(lightning.Callback):
        def on_train_batch_end(self, trainer, *_):
            if trainer.global_step == 2:
                raise ValueError("no more data")

    callback = StepscopeCallback()
    monkeypatch.setattr(lightning, "Trainer", functools.partial(lightning.Trainer, callbacks=[Stumbles(), callback]))
    with pytest.raises(ValueError, match="no more data"):
        runpy.run_path(script("lightning_trainer"))["main"]()
    assert (callback.trace.meta["status"], callback.trace.meta["error"]) == ("failed", "ValueError: no more data")
    assert callback.trace.meta["micro_steps"] == 8
    assert not installed()
