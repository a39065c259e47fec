"""A small CUDA driver-API program: prints what it sees, then does as it is told. Used by the drills on a real GPU.

usage: client.py [--hold]      one JSON line: {"sms", "freeMiB", "totalMiB", "allocatableMiB", "contextMs", "error"}
"""
import ctypes, json, sys, time

cuda = ctypes.CDLL("libcuda.so.1")


def call(name, *arguments):
    code = getattr(cuda, name)(*arguments)
    if code:
        raise RuntimeError(f"{name}: {code}")


def main():
    seen = {}
    try:
        start = time.monotonic()
        call("cuInit", 0)
        device, context = ctypes.c_int(), ctypes.c_void_p()
        call("cuDeviceGet", ctypes.byref(device), 0)
        call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
        call("cuCtxSetCurrent", context)
        seen["contextMs"] = round((time.monotonic() - start) * 1000, 1)
        count = ctypes.c_int()
        call("cuDeviceGetAttribute", ctypes.byref(count), 16, device)
        free, total = ctypes.c_size_t(), ctypes.c_size_t()
        call("cuMemGetInfo_v2", ctypes.byref(free), ctypes.byref(total))
        seen.update(sms=count.value, freeMiB=free.value >> 20, totalMiB=total.value >> 20)
        if "--allocate" in sys.argv:
            # The most that one allocation can get, by halving steps; plain memory, given back at once.
            got, step = 0, 1 << 37
            while step >= 1 << 20:
                pointer = ctypes.c_uint64()
                if got + step <= total.value and cuda.cuMemAlloc_v2(ctypes.byref(pointer), ctypes.c_size_t(got + step)) == 0:
                    got += step
                    cuda.cuMemFree_v2(pointer)
                step >>= 1
            seen["allocatableMiB"] = got >> 20
    except RuntimeError as error:
        seen["error"] = str(error)
    print(json.dumps(seen), flush=True)
    if "--hold" in sys.argv:
        sys.stdin.read()
    return 1 if "error" in seen else 0


sys.exit(main())
