"""The checks of e2e/gpu/toolkit. Prints one line for each, and fails if one fails."""
import json
import os
import pathlib
import subprocess
import sys
import time

WORK = pathlib.Path(os.environ["DRILL_WORK"])
USR = os.environ["DRILL_PLAIN_USR"]
SPECIFICATION = pathlib.Path("/var/run/cdi/cleave.dev-gpu.json")
# Prints what a CUDA program sees: whether it loads the driver, its GPUs, and a result.
PROGRAM = """
import ctypes, glob, json
seen = {"nodes": sorted(glob.glob("/dev/nvidia[0-9]*"))}
try:
    cuda = ctypes.CDLL("libcuda.so.1")
    seen["init"] = cuda.cuInit(0)
    count = ctypes.c_int(-1)
    cuda.cuDeviceGetCount(ctypes.byref(count))
    seen["count"] = count.value
    context, pointer = ctypes.c_void_p(), ctypes.c_uint64()
    seen["context"] = cuda.cuCtxCreate_v2(ctypes.byref(context), 0, 0)
    seen["memory"] = cuda.cuMemAlloc_v2(ctypes.byref(pointer), 1 << 20)
    seen["set"] = cuda.cuMemsetD8_v2(pointer, 7, 1 << 20)
    host = (ctypes.c_ubyte * 16)()
    seen["copy"] = cuda.cuMemcpyDtoH_v2(host, pointer, 16)
    seen["result"] = list(host) == [7] * 16
except OSError as error:
    seen["error"] = str(error)
print(json.dumps(seen))
"""
failed = 0


def check(name, passed, detail):
    """Prints the result of a check."""
    global failed
    failed += not passed
    print(f"{'ok    ' if passed else 'FAILED'} {name}: {detail}")


def specification(deadline=90):
    """Waits for the agent's CDI specification."""
    until = time.monotonic() + deadline
    while not SPECIFICATION.exists():
        if time.monotonic() > until:
            sys.exit("the agent wrote no specification:\n" + (WORK / "agent.log").read_text()[-4000:])
        time.sleep(0.2)
    return json.loads(SPECIFICATION.read_text())


def run(name, visible, config=""):
    """Runs PROGRAM in an unprivileged container of NVIDIA's runtime."""
    bundle = WORK / f"bundle-{name}"
    root = bundle / "rootfs"
    for directory in ["usr", "proc", "dev", "etc", "tmp", "run", "sys"]:
        (root / directory).mkdir(parents=True)
    for link in ["bin", "sbin", "lib", "lib64"]:
        (root / link).symlink_to(f"usr/{link}")
    # The container's /usr is the machine's without the driver. The runtime writes into it.
    for directory in ["upper", "work"]:
        (bundle / directory).mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "layer", bundle / "upper"], check=True)
    for directory in ["usr", "work"]:
        (bundle / "upper" / directory).mkdir()
    layer = f"lowerdir={USR},upperdir={bundle}/upper/usr,workdir={bundle}/upper/work"
    subprocess.run(["mount", "-t", "overlay", "overlay", "-o", layer, root / "usr"], check=True)
    subprocess.run(["nvidia-container-runtime", "spec", "--bundle", bundle], check=True)
    path = bundle / "config.json"
    spec = json.loads(path.read_text())
    spec["process"].update(terminal=False, args=["/usr/bin/python3", "-c", PROGRAM])
    spec["process"]["env"] = ["PATH=/usr/bin:/bin", "NVIDIA_DRIVER_CAPABILITIES=compute,utility"]
    if visible is not None:
        spec["process"]["env"].append(f"NVIDIA_VISIBLE_DEVICES={visible}")
    spec["root"]["readonly"] = False
    path.write_text(json.dumps(spec))
    home = bundle / "xdg" / "nvidia-container-runtime"
    home.mkdir(parents=True)
    (home / "config.toml").write_text(config)
    command = ["nvidia-container-runtime", "run", "--bundle", bundle, f"cleave-drill-{name}"]
    env = {**os.environ, "XDG_CONFIG_HOME": str(bundle / "xdg")}
    done = subprocess.run(command, capture_output=True, text=True, timeout=90, env=env)
    try:
        return json.loads(done.stdout.strip().splitlines()[-1])
    except (IndexError, ValueError):
        return {"rc": done.returncode, "stderr": done.stderr[-1500:]}


def main():
    """Runs all checks."""
    spec = specification()
    mounts = [mount["containerPath"] for mount in spec["containerEdits"]["mounts"]]
    check("the specification mounts libcuda", any("libcuda.so" in path for path in mounts), f"{len(mounts)} mounts")
    gpu = spec["devices"][0]["name"]
    works = lambda seen: seen.get("result") is True and seen["count"] == 1
    strict = "accept-nvidia-visible-devices-envvar-when-unprivileged = false\n"
    nothing = lambda seen: "error" in seen and not seen["nodes"]
    for name, visible, config, passes in [
        ("cdi", f"cleave.dev/gpu={gpu}", "", works),
        ("envvar", gpu, "", works),
        ("all", "all", "", works),
        ("void", "void", "", nothing),
        ("unset", None, "", nothing),
        ("strict-all", "all", strict, nothing),
    ]:
        seen = run(name, visible, config)
        check(name, passes(seen), json.dumps(seen))
    sys.exit(1 if failed else 0)


main()
