"""A small CUDA driver-API program for the drills on a real GPU. It prints JSON lines.

Without arguments it prints {"sms", "freeMiB", "totalMiB", "contextMs"} or {"error"}. Its arguments
add further actions. Times are seconds since the epoch.
"""
import argparse, ctypes, json, os, random, signal, statistics, subprocess, sys, threading, time

# spin keeps one SM busy for a number of cycles. fault writes to an unmapped address.
PTX = b"""
.version 7.0
.target sm_75
.address_size 64
.visible .entry spin(.param .u64 cycles)
{
  .reg .pred %again;
  .reg .b64 %limit, %start, %now;
  ld.param.u64 %limit, [cycles];
  mov.u64 %start, %clock64;
loop:
  mov.u64 %now, %clock64;
  sub.u64 %now, %now, %start;
  setp.lt.u64 %again, %now, %limit;
  @%again bra loop;
  ret;
}
.visible .entry fault()
{
  .reg .b64 %address;
  .reg .b32 %value;
  mov.u64 %address, 0x7f0000000000;
  mov.u32 %value, 1;
  st.global.u32 [%address], %value;
  ret;
}
\0"""
SM_COUNT, CLOCK_KHZ = 16, 13
BLOCKING_SYNC = 4


class CudaError(Exception):
    def __init__(self, name, code):
        super().__init__(f"{name}: {code}")
        self.code = code


class Gpu:
    def __init__(self):
        self.cuda = ctypes.CDLL("libcuda.so.1")
        self.call("cuInit", 0)
        self.device, self.context = ctypes.c_int(), ctypes.c_void_p()
        self.call("cuDeviceGet", ctypes.byref(self.device), 0)
        if options.block:
            self.call("cuDevicePrimaryCtxSetFlags_v2", self.device, BLOCKING_SYNC)
        self.call("cuDevicePrimaryCtxRetain", ctypes.byref(self.context), self.device)
        self.call("cuCtxSetCurrent", self.context)

    def call(self, name, *arguments):
        code = getattr(self.cuda, name)(*arguments)
        if code:
            raise CudaError(name, code)

    def attribute(self, number):
        value = ctypes.c_int()
        self.call("cuDeviceGetAttribute", ctypes.byref(value), number, self.device)
        return value.value

    def memory(self):
        free, total = ctypes.c_size_t(), ctypes.c_size_t()
        self.call("cuMemGetInfo_v2", ctypes.byref(free), ctypes.byref(total))
        return free.value, total.value

    def allocate(self, size):
        """Returns the address of `size` bytes, or None if the allocation fails."""
        pointer = ctypes.c_uint64()
        return None if self.cuda.cuMemAlloc_v2(ctypes.byref(pointer), ctypes.c_size_t(size)) else pointer

    def largest_allocation(self):
        """Finds the largest possible allocation in halving steps, and frees it immediately."""
        total, got, step = self.memory()[1], 0, 1 << 37
        while step >= 1 << 20:
            if got + step <= total and (pointer := self.allocate(got + step)):
                got += step
                self.call("cuMemFree_v2", pointer)
            step >>= 1
        return got

    def load(self):
        module = ctypes.c_void_p()
        self.call("cuModuleLoadData", ctypes.byref(module), PTX)
        self.spinning, self.faulting = ctypes.c_void_p(), ctypes.c_void_p()
        self.call("cuModuleGetFunction", ctypes.byref(self.spinning), module, b"spin")
        self.call("cuModuleGetFunction", ctypes.byref(self.faulting), module, b"fault")
        self.khz = self.attribute(CLOCK_KHZ)

    def launch(self, function, *values):
        parameters = (ctypes.c_void_p * max(1, len(values)))(*(ctypes.cast(ctypes.pointer(value), ctypes.c_void_p) for value in values))
        self.call("cuLaunchKernel", function, 1, 1, 1, 1, 1, 1, 0, None, parameters, None)

    def spin(self, milliseconds):
        self.launch(self.spinning, ctypes.c_uint64(int(milliseconds * self.khz)))
        self.call("cuCtxSynchronize")

    def fault(self):
        self.launch(self.faulting)
        self.call("cuCtxSynchronize")

    def create_and_destroy(self, make, end, *arguments):
        """Creates and destroys an object of the driver."""
        thing = ctypes.c_void_p()
        self.call(make, ctypes.byref(thing), *arguments)
        self.call(end, thing)


def say(**line):
    text = json.dumps(line) + "\n"
    if options.log:
        with open(options.log, "a") as file:
            file.write(text)
    sys.stdout.write(text)
    sys.stdout.flush()


def describe_gpu(gpu, began):
    free, total = gpu.memory()
    seen = {"sms": gpu.attribute(SM_COUNT), "freeMiB": free >> 20, "totalMiB": total >> 20, "contextMs": began}
    if options.allocate:
        seen["allocatableMiB"] = gpu.largest_allocation() >> 20
    return seen


def start_gpu():
    began = time.monotonic()
    gpu = Gpu()
    return gpu, round((time.monotonic() - began) * 1000, 1)


def start_child(arguments=(), **environment):
    return subprocess.Popen([sys.executable, __file__, *arguments], env={**os.environ, **environment}, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True)


def read_report(process):
    lines = process.communicate()[0].splitlines()
    return json.loads(lines[0]) if lines else {"error": f"no line, status {process.returncode}"}


def measure_call_rates(gpu, seconds):
    """Measures the rates of common CUDA calls, each for `seconds`, in calls per second."""
    size = 1 << 20
    host, block = ctypes.create_string_buffer(size), gpu.allocate(size)
    gpu.spin(0.01)

    def burst():
        for _ in range(100):
            gpu.launch(gpu.spinning, ctypes.c_uint64(1))
        gpu.call("cuCtxSynchronize")

    def allocate():
        gpu.call("cuMemFree_v2", gpu.allocate(size))

    kinds = {
        "launchAndWait": lambda: gpu.spin(0.001),
        "hundredLaunches": burst,
        "allocate": allocate,
        "copyToGpu": lambda: gpu.call("cuMemcpyHtoD_v2", block, host, ctypes.c_size_t(size)),
        "stream": lambda: gpu.create_and_destroy("cuStreamCreate", "cuStreamDestroy_v2", 1),
        "event": lambda: gpu.create_and_destroy("cuEventCreate", "cuEventDestroy_v2", 0),
        "module": lambda: gpu.create_and_destroy("cuModuleLoadData", "cuModuleUnload", PTX),
        "pinnedMemory": lambda: gpu.create_and_destroy("cuMemHostAlloc", "cuMemFreeHost", ctypes.c_size_t(size), 0),
    }
    rates = {}
    for name, act in kinds.items():
        act()
        done, began = 0, time.monotonic()
        while time.monotonic() - began < seconds:
            act()
            done += 1
        rates[name] = round(done / (time.monotonic() - began), 1)
    # Shares memory with another process.
    handle = (ctypes.c_ubyte * 64)()
    code = gpu.cuda.cuIpcGetMemHandle(handle, block)
    say(rates=rates, ipcHandleCode=code)


def count_starts(count, parallel):
    """Starts programs in bursts, half of them with raised limits, and counts their SMs."""
    counts, failed, raised, slowest = {}, [], {"CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": "100"}, 0
    random.seed(os.getpid())
    for begun in range(0, count, parallel):
        if options.until and os.path.exists(options.until):
            break
        burst = [start_child(**(raised if (begun + number) % 2 else {})) for number in range(min(parallel, count - begun))]
        for process in burst:
            got = read_report(process)
            if "error" in got:
                failed.append(got["error"])
            else:
                counts[got["sms"]] = counts.get(got["sms"], 0) + 1
                slowest = max(slowest, got["contextMs"])
    say(starts=sum(counts.values()) + len(failed), sms=counts, failed=failed, slowestMs=slowest)


def compare_context_times(direct, times):
    """Measures context creation directly and through the container's door, alternately."""
    measured = {"directMs": [], "throughMs": []}
    for _ in range(times):
        measured["directMs"].append(read_report(start_child(CUDA_MPS_PIPE_DIRECTORY=direct)).get("contextMs"))
        measured["throughMs"].append(read_report(start_child()).get("contextMs"))
    if None in measured["directMs"] + measured["throughMs"]:
        say(error="failed to create a context", **measured)
    else:
        say(medians={name: statistics.median(values) for name, values in measured.items()}, **measured)


def await_file(path):
    while not os.path.exists(path):
        time.sleep(0.001)


def exhaust_memory(path):
    """Allocates host memory once the file exists, until the kernel kills this process."""
    await_file(path)
    taken = []
    while True:
        taken.append(b"x" * (32 << 20))


def supervise(arguments):
    """Runs this program as a child and reports its exit within a millisecond."""
    process = subprocess.Popen([sys.executable, __file__, *arguments, *(["--log", options.log] if options.log else [])])
    signal.signal(signal.SIGTERM, lambda *_: process.send_signal(signal.SIGTERM))
    status = process.wait()
    say(exited=time.time(), status=status)
    if options.linger:
        time.sleep(options.linger)
    return status & 0xFF


def main():
    asked = threading.Event()
    if options.sigterm:
        signal.signal(signal.SIGTERM, lambda *_: options.sigterm == "finish" and asked.set())
    gpu, began = start_gpu()
    say(**describe_gpu(gpu, began))
    if options.hoard:
        threading.Thread(target=exhaust_memory, args=(options.hoard,), daemon=True).start()
    if options.exercise:
        gpu.load()
        sys.stdin.readline()
        measure_call_rates(gpu, options.exercise)
    if options.hold:
        sys.stdin.read()
    if options.take:
        addresses = [gpu.allocate(1 << 30) for _ in range(options.take)]
        say(takenMiB=sum(1024 for address in addresses if address), at=time.time())
    if options.touch or options.work is not None or options.fault:
        gpu.load()
        gpu.spin(0.01)
        say(firstKernel=time.time())
    if options.fault:
        while not os.path.exists(options.fault):
            gpu.spin(0.2)
        say(fault=time.time())
        gpu.fault()
    if options.work is not None:
        kernels = 0
        while not (asked.is_set() or options.until and os.path.exists(options.until)):
            gpu.spin(options.work)
            kernels += 1
        say(kernels=kernels)
    if options.wait:
        await_file(options.wait)
    return 0


parser = argparse.ArgumentParser()
parser.add_argument("--log", help="also write lines to this file")
parser.add_argument("--allocate", action="store_true", help="also find the largest possible allocation")
parser.add_argument("--hold", action="store_true", help="keep the context until standard input ends")
parser.add_argument("--wait", metavar="FILE", help="keep the context until the file exists")
parser.add_argument("--after", metavar="FILE", help="start once the file exists")
parser.add_argument("--touch", action="store_true", help="run one short kernel")
parser.add_argument("--work", type=float, metavar="MS", help="run kernels of this length, one after the other")
parser.add_argument("--until", metavar="FILE", help="with --work and --starts: until the file exists")
parser.add_argument("--block", action="store_true", help="wait for kernels without a busy loop")
parser.add_argument("--sigterm", choices=("finish", "ignore"), help="on SIGTERM: finish the kernel and exit, or ignore it")
parser.add_argument("--stay", action="store_true", help="after an error, keep running and ignore SIGTERM")
parser.add_argument("--hoard", metavar="FILE", help="allocate host memory without end once the file exists")
parser.add_argument("--exercise", type=float, metavar="SECONDS", help="after a line on standard input: measure all kinds of calls, each for this time")
parser.add_argument("--fault", metavar="FILE", help="access memory illegally once the file exists")
parser.add_argument("--take", type=int, metavar="GIB", help="allocate this much memory and keep it")
parser.add_argument("--linger", type=float, default=0, metavar="SECONDS", help="with --supervise: continue for this time after the child's exit")
parser.add_argument("--starts", type=int, metavar="N")
parser.add_argument("--parallel", type=int, default=4)
parser.add_argument("--compare", metavar="DIRECTORY")
parser.add_argument("--times", type=int, default=25)
parser.add_argument("--supervise", nargs=argparse.REMAINDER, help="run with the remaining arguments in a child, and report its exit")
options = parser.parse_args()
if __name__ == "__main__":
    if options.after:
        await_file(options.after)
    try:
        if options.supervise is not None:
            sys.exit(supervise(options.supervise))
        if options.starts:
            sys.exit(count_starts(options.starts, options.parallel))
        if options.compare:
            sys.exit(compare_context_times(options.compare, options.times))
        sys.exit(main())
    except (CudaError, OSError) as error:
        say(error=str(error), code=getattr(error, "code", None), at=time.time())
        if options.stay:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            time.sleep(3600)
        # The context is broken, and Python's cleanup could hang in it.
        os._exit(1)
