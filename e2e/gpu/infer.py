"""Runs inference and training like YOLOS-small (random weights, batch 1, 512x864), in phases.

usage: infer.py DIRECTORY NAME

DIRECTORY/phase-K.json starts a phase: {"begin": epoch, "seconds", "names": [...], "train": [...]}.
The program writes the times of its steps to DIRECTORY/result-K-NAME.
"""
import json, pathlib, sys, time

import torch
from transformers import YolosConfig, YolosForObjectDetection

directory, name = pathlib.Path(sys.argv[1]), sys.argv[2]


def write(file, value):
    (directory / f".{file}").write_text(json.dumps(value))
    (directory / f".{file}").rename(directory / file)


torch.manual_seed(1)
shape = YolosConfig(hidden_size=384, num_hidden_layers=12, num_attention_heads=6, intermediate_size=1536, image_size=[512, 864])
pixels = torch.randn(1, 3, 512, 864, device="cuda")


class Infer:
    def __init__(self):
        self.model = YolosForObjectDetection(shape).eval().cuda()

    @torch.inference_mode()
    def once(self):
        self.model(pixel_values=pixels).logits.float().cpu()


class Train:
    """Training steps of the same model, without a useful target."""

    def __init__(self):
        self.model = YolosForObjectDetection(shape).train().cuda()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)

    def once(self):
        loss = self.model(pixel_values=pixels).logits.square().mean()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        loss.item()


infer, train = Infer(), None
for _ in range(20):
    infer.once()
properties = torch.cuda.get_device_properties(0)
write(f"ready-{name}", {"sms": properties.multi_processor_count, "freeMiB": torch.cuda.mem_get_info()[0] >> 20})
number = 0
while not (directory / "end").exists():
    if not (directory / f"phase-{number}.json").exists():
        time.sleep(0.002)
        continue
    phase = json.loads((directory / f"phase-{number}.json").read_text())
    if name in phase["names"]:
        doer = infer
        if name in phase["train"]:
            train = doer = train or Train()
        for _ in range(5):
            doer.once()
        while time.time() < phase["begin"]:
            pass
        times, end = [], phase["begin"] + phase["seconds"]
        while (began := time.perf_counter(), time.time())[1] < end:
            doer.once()
            times.append(round((time.perf_counter() - began) * 1000, 2))
        write(f"result-{number}-{name}", times)
    number += 1
