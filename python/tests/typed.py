# SPDX-License-Identifier: Apache-2.0
# Code that a type checker must accept, and types that it must infer. test_typing.py checks this file; it is not run.
import pathlib

import muster


def weights(group: muster.Group, weight: muster.Tensor) -> dict[int, muster.Tensor]:
    found: dict[int, muster.Tensor] = {}
    with muster.get_configs_parallel({"weight": weight}, [0, 1], group, writable=True, timeout=30) as layers:
        for rank, config in layers.present():
            found[rank] = config["weight"]
        explained: str = layers.explain()
    with muster.get_tensors_parallel(weight, None, group) as parts:
        number: int = len(parts) + len(explained)
    assert number
    return found


def workspaces(folder: pathlib.Path, group: muster.Group) -> int:
    workspace = muster.Workspace(folder, group, steps_kept=3)
    state = workspace.read_configs_and_weights_from_rank(0, min_step=workspace.write_configs_and_weights({"a": 1}))
    return 0 if state is None else len(state.weights)


def layouts(folder: pathlib.Path, group: muster.Group) -> list[muster.Tensor]:
    merges: list[muster.merge.Merge] = [muster.merge.max, muster.merge.sum, muster.merge.concat(0, [2, 1])]
    report = muster.export_model(folder, folder / "out", "auto", group, source_layout="tp=2", target_layout=4, key="model")
    muster.shard_model(folder, folder / "shards", report["manifest"]["plan"], "auto", extra_files="none", step=len(merges))
    return list(muster.load_shard(folder, 2, 0, "auto", key="model").values())


def live(folder: pathlib.Path, group: muster.Group, weight: muster.Tensor) -> str:
    state = {"weight": weight, "rows": [muster.Part(weight, (8, 4), offset=(0, 0))]}
    muster.export_model(({name: value} for name, value in state.items()), folder / "layers", files={"config.json": "{}"})
    work: muster.ExportWork = muster.export_model(state, folder / "out", group=group, check_replicas=False, wait=False)
    if not work.wait(timeout=1.0):
        work.cancel()
    return str(work.get()["manifest"]) if work.is_done() else ""


async def background(group: muster.Group, weight: muster.Tensor) -> list[tuple[int, ...]]:
    future: muster.Future[muster.GatheredTensors] = muster.get_tensors_async(weight, None, group, route="shm")
    with future.result(timeout=30) as parts:
        shapes = [part.shape for part in parts] + [parts[0].shape, parts.by_rank(1).shape, *(part.shape for part in parts[1:])]
    configs = await muster.get_configs_async({"a": 1}, group=group)
    merged: muster.Tensor | None = await muster.merge_tensor_async(weight, muster.merge.sum, group=group)
    return shapes if merged is None else [merged.shape, (len(configs),)]


def closed(group: muster.Group, weight: muster.Tensor) -> float:
    with group.duplicate() as other, muster.ProcessGroup(other) as ranks, muster.MessageQueue(other, dead_reader="drop") as queue:
        ranks.all_reduce(weight, muster.ReduceOp.MAX)
        ranks.all_reduce(weight, "max", timeout=3)
        part: muster.ProcessGroup | None = ranks.split(range(1))
        shared: muster.Tensor = ranks.all_reduce_shared(weight)
        rows, counts = ranks.all_to_allv(weight, [1, 2])
        config, sender, tag = ranks.recv_config(None)
        queue.put_config({"rows": sum(counts), "sender": sender + tag, "config": config, "part": part is None})
    muster.use_logging("debug")
    row: muster.Tensor = shared[0, ..., ::2]
    number: float = row.item()
    return number + len(rows) + sum(each.size for each in row)


def merged(group: muster.Group, weight: muster.Tensor) -> str:
    whole = muster.merge_tensor_parallel(weight, muster.merge.concat(0), None, group)
    return "" if whole is None else whole.dtype


def files(folder: pathlib.Path, group: muster.Group, weight: muster.Tensor) -> str:
    muster.write_state_file(folder / "state.h5", {"weight": weight}, progress=lambda done, total, seconds: None)
    config, weights = muster.read_state_file(folder / "state.h5")
    muster.save_safetensors(folder / "model.safetensors", weights)
    shard = muster.load_shard(folder, "tp=2", 0, "auto", group)
    for part in muster.gather_each(iter([config]), [0, 1], group, memory_budget="1MiB"):
        for rank, layer in part.present():
            shard[f"{rank}.{part.layer}"] = muster.as_tensor(layer["weight"], "U8", (4,))
    streamed: muster.Future[dict[str, object]] = muster.gather_each_async([config], lambda part: print(part.layer), [0, 1], group, timeout=9)
    print(streamed.result(timeout=10)["parts"])
    good: bool = muster.verify(folder)["good"]
    return "good" if good else shard["0.0"].dtype


def versions(folder: pathlib.Path, group: muster.Group, weight: muster.Tensor) -> list[int]:
    with muster.Publisher(folder / "weights", base=folder, group=group, encoding="overwrite", keep_for=60) as publisher:
        report: muster.PublishReport = publisher.publish({"weight": weight}, full=True, progress=lambda done, total, seconds: None)
        source: str = publisher.source
    number: int = muster.publish(folder, source, base=folder, full_every=3).version
    pulled: muster.PullReport = muster.pull(source, folder / "local", base=folder, version=number, durability="synced")
    log: muster.VersionLog = muster.versions(source, verify=True)
    info: muster.VersionInfo = log.versions[0]
    local: muster.LocalVersion | None = log.local
    shares = [1 if each.changed_elements is None else each.changed_elements for each in log.versions]
    return [*pulled.applied, report.files, info.tensors, *shares, 0 if local is None or local.version is None else local.version]


def wrong(weight: muster.Tensor) -> int:
    return weight.dtype  # not an int


def wrong_rank(folder: pathlib.Path) -> dict[str, muster.Tensor]:
    return muster.load_shard(folder, "tp=2", "first", "auto")


def former_name(folder: pathlib.Path) -> object:
    return muster.verify(folder, base="model")
