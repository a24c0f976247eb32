"""The BLAKE3 kernel for CUDA, compiled for one device. A table of ranges of its memory enters; their digests leave.

What it is given, and in which order it is launched, is at the top of `loading.gpu_digest`.
"""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import torch

__all__ = ["SOURCE", "CudaDigestKernel"]

_THREADS_PER_BLOCK = 128

SOURCE = r"""
typedef unsigned int u32;
typedef long long s64;
typedef unsigned long long u64;
enum : u32 { CHUNK_START = 1, CHUNK_END = 2, PARENT = 4, ROOT = 8 };

__device__ __forceinline__ u32 rotated(u32 word, int bits) { return word >> bits | word << (32 - bits); }

__device__ __forceinline__ void mix(u32 &a, u32 &b, u32 &c, u32 &d, u32 x, u32 y) {
    a += b + x; d = rotated(d ^ a, 16); c += d; b = rotated(b ^ c, 12);
    a += b + y; d = rotated(d ^ a, 8);  c += d; b = rotated(b ^ c, 7);
}

__device__ __forceinline__ void begin(u32 *value) {
    value[0] = 0x6A09E667; value[1] = 0xBB67AE85; value[2] = 0x3C6EF372; value[3] = 0xA54FF53A;
    value[4] = 0x510E527F; value[5] = 0x9B05688C; value[6] = 0x1F83D9AB; value[7] = 0x5BE0CD19;
}

// The words stay in registers: every index is known once the inner loops are unrolled. The rounds are not: that would
// save a few moves, and cost more time in the compiler than these take for all the bytes of a device.
__device__ __forceinline__ void compress(u32 *value, u32 *message, u32 counter, u32 size, u32 flags) {
    const int order[16] = {2, 6, 3, 10, 7, 0, 4, 13, 1, 11, 12, 5, 9, 14, 15, 8};
    u32 s[16], next[16];
    begin(s + 8);
    s[12] = counter; s[13] = 0; s[14] = size; s[15] = flags;
#pragma unroll
    for (int i = 0; i < 8; i++) s[i] = value[i];
#pragma unroll 1
    for (int round = 0; round < 7; round++) {
#pragma unroll
        for (int i = 0, j = 0; i < 4; i++, j += 2)
            mix(s[i], s[4 + i], s[8 + i], s[12 + i], message[j], message[j + 1]);
#pragma unroll
        for (int i = 0, j = 8; i < 4; i++, j += 2)
            mix(s[i], s[4 + (i + 1) % 4], s[8 + (i + 2) % 4], s[12 + (i + 3) % 4], message[j], message[j + 1]);
#pragma unroll
        for (int i = 0; i < 16; i++) next[i] = message[order[i]];
#pragma unroll
        for (int i = 0; i < 16; i++) message[i] = next[i];
    }
#pragma unroll
    for (int i = 0; i < 8; i++) value[i] = s[i] ^ s[i + 8];
}

__device__ __forceinline__ void load_words(u32 *words, const void *memory) {
    uint4 a = ((const uint4 *)memory)[0], b = ((const uint4 *)memory)[1];
    words[0] = a.x; words[1] = a.y; words[2] = a.z; words[3] = a.w;
    words[4] = b.x; words[5] = b.y; words[6] = b.z; words[7] = b.w;
}

// A block that is short, or begins anywhere. Reads no aligned word that has none of its bytes: memory may end there.
__device__ __forceinline__ void load_odd_block(u32 *message, const unsigned char *bytes, int size) {
    int before = (int)((s64)bytes & 3), end = before + size;
    const u32 *words = (const u32 *)(bytes - before);
    u32 low = size ? words[0] : 0;
#pragma unroll
    for (int i = 0; i < 16; i++) {
        u32 high = 4 * i + 4 < end ? words[i + 1] : 0;
        int left = size - 4 * i;
        message[i] = (u32)(((u64)high << 32 | low) >> (8 * before));
        if (left < 4) message[i] &= left > 0 ? (1u << (8 * left)) - 1 : 0;
        low = high;
    }
}

__device__ __forceinline__ int range_of(const s64 *ends, int ranges, int thread) {
    int low = 0, high = ranges - 1;
    while (low < high) {
        int middle = (low + high) / 2;
        if (ends[middle] > thread) high = middle; else low = middle + 1;
    }
    return low;
}

// Level 0 digests chunks; each above it joins pairs of the level below. A thread has one node.
extern "C" __global__ void digest_nodes(const s64 *table, int ranges, int level, int threads, u32 *values) {
    int thread = blockIdx.x * blockDim.x + threadIdx.x;
    if (thread >= threads) return;
    const s64 *ends = table + (3 + level) * ranges;
    int range = range_of(ends, ranges, thread);
    s64 node = thread - (range ? ends[range - 1] : 0);
    s64 first = table[2 * ranges + range], chunks = table[3 * ranges + range] - first;
    u32 *place = values + 8 * (first + (node << level));
    const unsigned char *bytes = (const unsigned char *)table[range] + node * 1024;
    s64 rest = level ? 64 : table[ranges + range] - node * 1024;
    int left = rest < 1024 ? (int)rest : 1024;
    u32 flags = level ? PARENT : CHUNK_START, end_flags = (level ? 0 : CHUNK_END) | (chunks <= 1ll << level ? ROOT : 0);
    u32 value[8], message[16];
    begin(value);
#pragma unroll 1
    do {  // at least once: no bytes are a block as well
        int size = left < 64 ? left : 64;
        left -= size;
        if (level || (size == 64 && ((s64)bytes & 15) == 0)) {
            load_words(message, level ? (void *)place : (void *)bytes);
            load_words(message + 8, level ? (void *)(place + (4ll << level)) : (void *)(bytes + 32));
        } else {
            load_odd_block(message, bytes, size);
        }
        compress(value, message, level ? 0 : (u32)node, size, left ? flags : flags | end_flags);
        bytes += 64;
        flags = 0;
    } while (left);
    ((uint4 *)place)[0] = make_uint4(value[0], value[1], value[2], value[3]);
    ((uint4 *)place)[1] = make_uint4(value[4], value[5], value[6], value[7]);
}
"""


class CudaDigestKernel:
    """The kernel, compiled for one device by the compiler that torch came with.

    torch.cuda._compile_kernel would do, but for what it asks of the machine: an installed CUDA toolkit and setuptools.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        # torch's own door to NVRTC and to the driver: what it is linked to is found through it.
        self._library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libcaffe2_nvrtc.so"))
        binary = _compiled(self._library, "sm_{}{}".format(*torch.cuda.get_device_capability(device)))
        module, self._function = ctypes.c_void_p(), ctypes.c_void_p()
        with torch.cuda.device(device):
            torch.zeros(1, device=device)  # the driver wants a context, and torch makes it at the first use
            _ask(self._library.cuModuleLoadData, ctypes.byref(module), binary)
            _ask(self._library.cuModuleGetFunction, ctypes.byref(self._function), module, b"digest_nodes")

    def __call__(self, threads: int, table: torch.Tensor, level: int, values: torch.Tensor) -> None:
        numbers = (ctypes.c_int(table.shape[1]), ctypes.c_int(level), ctypes.c_int(threads))
        arguments = (ctypes.c_void_p(table.data_ptr()), *numbers, ctypes.c_void_p(values.data_ptr()))
        pointers = (ctypes.c_void_p * len(arguments))(*map(ctypes.addressof, arguments))
        shape = (-(-threads // _THREADS_PER_BLOCK), 1, 1, _THREADS_PER_BLOCK, 1, 1)
        stream = ctypes.c_void_p(torch.cuda.current_stream(self._device).cuda_stream)
        with torch.cuda.device(self._device):
            _ask(self._library.cuLaunchKernel, self._function, *shape, 0, stream, pointers, None)


def _compiled(library: ctypes.CDLL, architecture: str) -> ctypes.Array[ctypes.c_char]:
    program, size = ctypes.c_void_p(), ctypes.c_size_t()
    options = (ctypes.c_char_p * 1)(f"--gpu-architecture={architecture}".encode())
    _ask(library.nvrtcCreateProgram, ctypes.byref(program), SOURCE.encode(), b"digesting.cu", 0, None, None)
    try:
        _ask(library.nvrtcCompileProgram, program, len(options), options)
        _ask(library.nvrtcGetCUBINSize, program, ctypes.byref(size))
        binary = ctypes.create_string_buffer(size.value)
        _ask(library.nvrtcGetCUBIN, program, binary)
    finally:
        _ask(library.nvrtcDestroyProgram, ctypes.byref(program))
    return binary


def _ask(function: Any, *arguments: Any) -> None:
    code = function(*arguments)
    if code != 0:
        raise RuntimeError(f"{function.__name__} answers {code}")
