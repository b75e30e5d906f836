"""A run's curves and samples, read back from TensorBoard's events."""

import math
import re
from pathlib import Path
from typing import Any


def read_events(run_dir: Path, points: int = 0) -> Any:
    """TensorBoard's reader of a run's curves and samples; at most so many points of a curve, or all."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator  # takes a second to import

    events = EventAccumulator(str(run_dir), size_guidance={"scalars": points, "tensors": 0})
    events.Reload()
    return events


def scalars(events: Any, tag: str) -> list[tuple[int, float]]:
    """A curve: (step, value) each; empty where there is none."""
    return [(event.step, event.value) for event in events.Scalars(tag)] if tag in events.Tags()["scalars"] else []


def ended(events: Any) -> tuple[int, str]:
    """(Step, what has ended the run there): a key, a signal, or an error; (-1, "") where it isn't known."""
    if "end/text_summary" not in events.Tags()["tensors"]:
        return -1, ""
    last = events.Tensors("end/text_summary")[-1]
    return last.step, last.tensor_proto.string_val[0].decode()


def learned(url: str) -> dict[str, Any] | None:
    """The finite losses and the samples in the TensorBoard events beside a snapshot; None where there are none."""
    folder = Path(url).parent
    if not any(folder.glob("events.out.tfevents.*")):
        return None
    events, tag = read_events(folder, 500), "samples/text_summary"
    samples = [
        [event.step, re.sub(r"^    ", "", event.tensor_proto.string_val[0].decode(), flags=re.MULTILINE)]
        for event in (events.Tensors(tag) if tag in events.Tags()["tensors"] else [])
    ]
    # JSON has no infinity and no NaN, and a curve no place for them.
    training, evaluation = (
        [point for point in scalars(events, name) if math.isfinite(point[1])] for name in ("train/loss", "eval/loss")
    )
    return {"training": training, "evaluation": evaluation, "samples": samples}
