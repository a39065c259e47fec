#!/usr/bin/env python3
"""Tests the MPS host and its doors with the real driver, without Kubernetes.

usage: door.py HOST [LIAR [LIE...]]

HOST is cleave-mps-host. LIAR is cleave-client, which violates the handshake while other programs
must continue. With LIEs only these violations are tested. The results are one JSON object on
standard output. Requires root, a GPU, and the driver's nvidia-cuda-mps-control on PATH. Compute
mode, MIG mode, clocks and persistence mode do not change.
"""
import json, os, pathlib, random, shutil, signal, socket, statistics, subprocess, sys, tempfile, time

from lies import LIES

HERE = pathlib.Path(__file__).parent
cleave = os.path.abspath(sys.argv[1])
liar, lies = (os.path.abspath(sys.argv[2]) if sys.argv[2:] else None), sys.argv[3:]
run = pathlib.Path(tempfile.mkdtemp(prefix="cleave-door-"))
results, failed = {}, []


class RequestedTestsDone(Exception):
    """The requested part of the tests is complete."""


def check(name, holds, figures=None):
    results[name] = {"passed": bool(holds), **({"figures": figures} if figures is not None else {})}
    print(f"{'ok  ' if holds else 'FAIL'} {name} {json.dumps(figures) if figures is not None else ''}", file=sys.stderr, flush=True)
    if not holds:
        failed.append(name)


def wait(what, condition, seconds=30):
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        try:
            if value := condition():
                return value
        except (OSError, ValueError, KeyError):
            pass
        time.sleep(0.01)
    raise TimeoutError(what)


def query_gpu(query):
    return subprocess.run(["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader,nounits"], check=True, capture_output=True, text=True).stdout.strip()


uuid, total, name, driver = (part.strip() for part in query_gpu("uuid,memory.total,name,driver_version").splitlines()[0].split(","))
results["machine"] = {"gpu": name, "driver": driver, "memoryMiB": int(total), "cleave": subprocess.run([cleave, "--version"], capture_output=True, text=True).stdout.strip()}
modes_before = query_gpu("compute_mode,mig.mode.current,persistence_mode")
units = 10
usable = int(total) - 1024
desired = {"version": 1, "daemons": {uuid: {"multiUser": True, "exclusive": False, "defaultThreads": None, "defaultMemoryMib": None}}, "allocations": {}}


def allocation(key, threads, memory):
    (run / "alloc" / key).mkdir(parents=True, exist_ok=True)
    desired["allocations"][key] = {"device": uuid, "threads": threads, "memoryMib": memory, "maxClients": None}


def write():
    (run / "mps").mkdir(exist_ok=True)
    temporary = run / "mps" / ".desired"
    temporary.write_text(json.dumps(desired))
    temporary.rename(run / "mps" / "desired.json")


def send_request(**request):
    with socket.socket(socket.AF_UNIX) as host:
        host.settimeout(60)
        host.connect(str(run / "mps" / "host.sock"))
        host.sendall((json.dumps(request) + "\n").encode())
        return json.loads(host.makefile().readline())


def status():
    return json.loads((run / "mps" / "status.json").read_text())


def client(pipe, *arguments, **environment):
    env = {**os.environ, "CUDA_MPS_PIPE_DIRECTORY": str(pipe), **environment}
    return subprocess.Popen([sys.executable, str(HERE / "client.py"), *arguments], env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def read_line(process):
    return json.loads(process.stdout.readline() or '{"error": "no line"}')


def run_once(pipe, *arguments, **environment):
    process = client(pipe, *arguments, **environment)
    process.stdin.close()
    value = read_line(process)
    process.wait()
    return value


def sms(percent, of):
    return of if percent in (None, 100) else max(8, of * percent // 100 & ~1)


def host_processes():
    """Returns the PIDs of the MPS host and of its processes for devices."""
    found = [host.pid]
    for path in pathlib.Path("/proc").glob("[0-9]*/cmdline"):
        try:
            arguments = path.read_bytes().split(b"\0")
        except OSError:
            continue
        if b"--device" in arguments and arguments[-3:-1] == [b"--parent", str(host.pid).encode()]:
            found.append(int(path.parent.name))
    return found


def signal_host(number):
    for pid in host_processes():
        os.kill(pid, number)


def host_seconds():
    return sum(map(processor_seconds, host_processes()))


def processor_seconds(pid):
    fields = pathlib.Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def measure_calls(pipe, stopped=False):
    """Returns a client's call rates through this pipe directory, and the MPS host's CPU time."""
    process = client(pipe, "--exercise", "0.4")
    read_line(process)
    before = host_seconds()
    if stopped:
        signal_host(signal.SIGSTOP)
    try:
        said = process.communicate("go\n", timeout=20)[0]
        got = json.loads(said.splitlines()[0]) if said else {"error": f"no line, status {process.returncode}"}
    except subprocess.TimeoutExpired:
        process.kill()
        got = {"error": "the client waits for the MPS host"}
    finally:
        signal_host(signal.SIGCONT)
    process.wait()
    return {**got, "hostSeconds": round(host_seconds() - before, 3)}


def run_violations(lies):
    """Runs each violation beside programs of the same and of other allocations."""
    until, of = run / "enough", run_once(door("ff"))["sms"]
    neighbour = client(door("03"), "--work", "1", "--until", str(until))
    [read_line(neighbour) for _ in range(2)]
    before, rows = status()["daemons"][uuid], []
    for lie in lies:
        began = time.monotonic()
        reported = subprocess.run([liar, "--lie", lie, "--hold", "8"], env={**os.environ, "CUDA_MPS_PIPE_DIRECTORY": str(door("02"))}, capture_output=True, text=True, timeout=60).stdout.strip()
        row = {"lie": lie, "reported": reported and json.loads(reported), "seconds": round(time.monotonic() - began, 2)}
        other, own = run_once(door("05")), run_once(door("02"))
        now = status()["daemons"][uuid]
        row |= {"othersMs": other.get("contextMs"), "ownMs": own.get("contextMs")}
        harmed = []
        if (other.get("sms"), own.get("sms")) != (sms(50, of), sms(20, of)):
            harmed.append({"other": other, "own": own})
        if [now[key] for key in ("pid", "serverPid", "restarts")] != [before[key] for key in ("pid", "serverPid", "restarts")]:
            harmed.append({"daemon": now})
            before = now
        if neighbour.poll() is not None:
            harmed.append({"neighbour": neighbour.stdout.read().strip()})
            neighbour = client(door("03"), "--work", "1", "--until", str(until))
            [read_line(neighbour) for _ in range(2)]
        rows.append({**row, **({"harmed": harmed} if harmed else {})})
        print(f"       {json.dumps(rows[-1])}", file=sys.stderr, flush=True)
    until.touch()
    kernels = read_line(neighbour)
    neighbour.wait()
    check(f"{len(lies)} handshake violations: the server stays the same, and neighbours compute and start", "kernels" in kernels and not any("harmed" in row for row in rows),
          {"harmed": [row for row in rows if "harmed" in row], "slowestStartMs": max(row["othersMs"] or 0 for row in rows), "slowestOwnStartMs": max(row["ownMs"] or 0 for row in rows), "neighbour": kernels})
    results["lies"] = rows


def resident_memory(pid):
    fields = dict(line.split(":", 1) for line in pathlib.Path(f"/proc/{pid}/status").read_text().splitlines() if ":" in line)
    return {"rssKiB": int(fields["VmRSS"].split()[0]), "anonymousKiB": int(fields["RssAnon"].split()[0])}


for k in range(1, units + 1):
    allocation(f"{k:02x}", 100 * k // units, usable * k // units)
allocation("ff", None, None)
log = open(run / "host.log", "w")
host = subprocess.Popen([cleave, "--run-dir", str(run)], stdout=log, stderr=log)
try:
    write()
    start = time.monotonic()
    wait("the MPS host answers", lambda: (run / "mps" / "host.sock").exists())
    reply = send_request(op="await", allocation="ff", timeoutMs=30000)
    check("the daemon runs and the door is open", reply.get("result") == "done", {"reply": reply, "seconds": round(time.monotonic() - start, 2)})
    daemon = status()["daemons"][uuid]
    check("the handshake is known, so limits are hard", daemon["enforcement"] == "Hard", daemon)
    door = lambda key: run / "alloc" / key
    if lies:
        run_violations(lies)
        raise RequestedTestsDone

    whole = run_once(door("ff"))
    check("an uncapped allocation sees the whole GPU", "error" not in whole and whole["freeMiB"] > usable - 2048, whole)
    of = whole.get("sms", 132)
    rows = []
    for k in range(1, units + 1):
        got = run_once(door(f"{k:02x}"), "--allocate")
        rows.append({"shares": k, "expectedSms": sms(100 * k // units, of), "limitMiB": usable * k // units, **got})
    check("k of 10 shares give the SMs and memory of k shares",
          all("error" not in row and row["sms"] == row["expectedSms"] and row["limitMiB"] - 1024 <= row["freeMiB"] <= row["limitMiB"] for row in rows), rows)
    raised = run_once(door("02"), CUDA_MPS_ACTIVE_THREAD_PERCENTAGE="100", CUDA_MPS_PINNED_DEVICE_MEM_LIMIT=f"0={total}M")
    check("limits cannot be raised by the environment", raised.get("sms") == sms(20, of) and raised["freeMiB"] <= usable * 2 // units, raised)
    lowered = run_once(door("05"), CUDA_MPS_ACTIVE_THREAD_PERCENTAGE="10")
    check("limits can be lowered by the environment", lowered.get("sms") == sms(10, of), lowered)

    refused = {}
    for command in ["get_server_list", "set_default_active_thread_percentage 100", "quit"]:
        done = subprocess.run(["nvidia-cuda-mps-control"], input=command + "\n", env={**os.environ, "CUDA_MPS_PIPE_DIRECTORY": str(door("01"))}, capture_output=True, text=True, timeout=60)
        refused[command] = {"rc": done.returncode, "out": (done.stdout + done.stderr).strip()}
    check("administrators' commands are refused at the door", run_once(door("01")).get("sms") == sms(10, of) and not any(value["out"].isdigit() for value in refused.values()), refused)

    held, wrong = [], []
    random.seed(1)
    for batch in range(12):
        keys = [random.choice(["01", "02", "03", "05", "0a", "ff"]) for _ in range(4)]
        held += [(key, client(door(key), "--hold")) for key in keys]
    limits = {"01": 10, "02": 20, "03": 30, "05": 50, "0a": 100, "ff": None}
    for key, process in held:
        got = read_line(process)
        if got.get("sms") != sms(limits[key], of):
            wrong.append({"door": key, **got})
    listed = len(status()["daemons"][uuid]["clients"])
    check("48 concurrent clients of six allocations see their own limits", not wrong, {"wrong": wrong, "listed": listed})
    over = run_once(door("01"))
    check("the 49th client is rejected, not accepted without limits", over.get("sms") != of, over)
    for _, process in held:
        process.stdin.close()
        process.wait()

    starts = []
    for burst in range(25):
        keys = [random.choice(list(limits)) for _ in range(8)]
        processes = [(key, client(door(key))) for key in keys]
        for key, process in processes:
            process.stdin.close()
            got = read_line(process)
            process.wait()
            starts.append(got.get("sms") == sms(limits[key], of))
    check("200 starts in bursts of 8 see their own limits", all(starts), {"right": sum(starts), "of": len(starts)})

    # A client must stay connected: if no client remains, the server is replaced after each client
    # (docs/explanation/faults.md).
    stays = client(door("01"), "--hold")
    read_line(stays)
    direct, through = [], []
    for _ in range(25):
        direct.append(run_once(run / "mps" / uuid).get("contextMs"))
        through.append(run_once(door("0a")).get("contextMs"))
    figures = {"directMs": statistics.median(direct), "throughMs": statistics.median(through), "direct": direct, "through": through}
    check("a context through the door takes at most 10 ms longer (median)", figures["throughMs"] - figures["directMs"] <= 10, figures)

    stays.stdin.close()
    stays.wait()
    idle = [run_once(door("0a")).get("contextMs") for _ in range(9)]
    results["a context on a GPU without clients, right after another client exited"] = {"figures": {"medianMs": statistics.median(idle), "through": idle}}

    turns = [(measure_calls(run / "mps" / uuid), measure_calls(door("ff"))) for _ in range(3)]
    stopped = measure_calls(door("ff"), stopped=True)
    names = list(turns[0][0].get("rates", {}))
    rates = {name: [statistics.median(turn[way]["rates"][name] for turn in turns) for way in (0, 1)] + [stopped.get("rates", {}).get(name)] for name in names}
    seconds = sum(turn[1]["hostSeconds"] for turn in turns)
    check("a running client does not need the MPS host and works while it is stopped", "rates" in stopped, {"perSecondDirectByDoorHostStopped": rates, "ipc": [stopped.get("ipcHandleCode"), turns[0][0].get("ipcHandleCode")], "error": stopped.get("error")})
    check("clients' work costs the MPS host no CPU time", seconds <= 0.1, {"hostSeconds": round(seconds, 3), "ofClientSeconds": round(3 * 0.4 * len(names), 1)})
    check("call rates through the door are within 10 % of direct ones", all(by >= 0.9 * straight for straight, by, _ in rates.values()), {name: round(by / straight, 3) for name, (straight, by, _) in rates.items()})

    if liar:
        run_violations(LIES)

    pid = status()["daemons"][uuid]["pid"]
    start = time.monotonic()
    os.kill(pid, signal.SIGKILL)
    late = [client(door("03")) for _ in range(3)]
    for process in late:
        process.stdin.close()
    after = [read_line(process) for process in late]
    waited = round(time.monotonic() - start, 2)
    [process.wait() for process in late]
    check("clients that connect while the daemon is dead wait and then run under their limits", all(got.get("sms") == sms(30, of) for got in after), {"clients": after, "seconds": waited})
    again = wait("the daemon has restarted", lambda: (d := status()["daemons"][uuid]) and d["pid"] not in (None, pid) and d["state"] == "Active" and d)
    check("the restarted daemon has its limits", run_once(door("02")).get("sms") == sms(20, of), again)
    memory = {pid: resident_memory(pid) for pid in host_processes()}
    check("the memory of each process of the MPS host", all(one["rssKiB"] <= 4096 for one in memory.values()), memory)
except RequestedTestsDone:
    pass
finally:
    host.send_signal(signal.SIGTERM)
    try:
        results["exit"] = host.wait(30)
    except subprocess.TimeoutExpired:
        host.kill()
        failed.append("the MPS host did not exit")
    log.close()
    results["log"] = (run / "host.log").read_text().splitlines()[-200:]
    results["modes"] = {"before": modes_before, "after": query_gpu("compute_mode,mig.mode.current,persistence_mode")}
    check("the GPU's modes are unchanged", modes_before == results["modes"]["after"], results["modes"])
    shutil.rmtree(run, ignore_errors=True)
    print(json.dumps(results, indent=1))
print(f"{sum(1 for value in results.values() if isinstance(value, dict) and value.get('passed'))} passed, {len(failed)} failed", file=sys.stderr)
sys.exit(1 if failed else 0)
