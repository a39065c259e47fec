#!/usr/bin/env python3
"""The CUDA program of `cleave doctor`. Prints a line {"sms", "freeMiB"} or {"error": code}.

With --read-line it then waits for a line, or the end, of standard input. With --allocate it then
allocates memory and prints another line. It requires only Python and the driver's libcuda.so.1.
"""
import argparse, ctypes, json, os, sys

SM_COUNT = 16


class CudaError(Exception):
    pass


def call(name, *arguments):
    code = getattr(cuda, name)(*arguments)
    if code:
        raise CudaError(code)


def say(**line):
    print(json.dumps(line), flush=True)


def main():
    device, context, sms = ctypes.c_int(), ctypes.c_void_p(), ctypes.c_int()
    call("cuInit", 0)
    call("cuDeviceGet", ctypes.byref(device), 0)
    call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
    call("cuCtxSetCurrent", context)
    call("cuDeviceGetAttribute", ctypes.byref(sms), SM_COUNT, device)
    free, total = ctypes.c_size_t(), ctypes.c_size_t()
    call("cuMemGetInfo_v2", ctypes.byref(free), ctypes.byref(total))
    say(sms=sms.value, freeMiB=free.value >> 20, totalMiB=total.value >> 20)
    if options.read_line:
        sys.stdin.readline()
    if options.allocate:
        address = ctypes.c_uint64()
        call("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(options.allocate << 20))
        say(allocatedMiB=options.allocate)
    call("cuDevicePrimaryCtxRelease_v2", device)


parser = argparse.ArgumentParser()
parser.add_argument("--allocate", type=int, metavar="MIB")
parser.add_argument("--read-line", action="store_true")
options = parser.parse_args()
try:
    cuda = ctypes.CDLL("libcuda.so.1")
    main()
except CudaError as error:
    say(error=error.args[0])
    # The context is broken, and Python's cleanup could hang in it.
    os._exit(1)
