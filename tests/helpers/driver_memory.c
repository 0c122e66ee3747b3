/* The driver's virtual memory management on the host's memory, compiled against the real cuda.h: a wrong prototype does
 * not compile. Physical memory is an anonymous file; a mapping is a mapping of it; `room` is what the device has.
 */
#define _GNU_SOURCE
#include <cuda.h>
#include <sys/mman.h>
#include <unistd.h>

#define STEP ((size_t)1 << 21)
size_t room = (size_t)64 << 20, taken = 0;
int contexts_set = 0;
static CUcontext current = NULL;

CUresult cuCtxGetCurrent(CUcontext *context) { *context = current; return CUDA_SUCCESS; }
CUresult cuCtxSetCurrent(CUcontext context) { current = context; contexts_set++; return CUDA_SUCCESS; }
CUresult cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice device) {
    *context = (CUcontext)(uintptr_t)(0x700000000000 + device);
    return CUDA_SUCCESS;
}

static int is_on_the_device(const CUmemAllocationProp *prop) {
    return prop->type == CU_MEM_ALLOCATION_TYPE_PINNED && prop->requestedHandleTypes == CU_MEM_HANDLE_TYPE_NONE &&
           prop->location.type == CU_MEM_LOCATION_TYPE_DEVICE && prop->location.id == 1 &&
           !prop->win32HandleMetaData && !prop->allocFlags.compressionType && !prop->allocFlags.usage;
}

CUresult cuMemGetAllocationGranularity(size_t *size, const CUmemAllocationProp *prop,
                                       CUmemAllocationGranularity_flags option) {
    if (!is_on_the_device(prop) || option != CU_MEM_ALLOC_GRANULARITY_MINIMUM) return CUDA_ERROR_INVALID_VALUE;
    *size = STEP;
    return CUDA_SUCCESS;
}

CUresult cuMemAddressReserve(CUdeviceptr *address, size_t size, size_t alignment, CUdeviceptr hint,
                             unsigned long long flags) {
    if (size % STEP || alignment || hint || flags) return CUDA_ERROR_INVALID_VALUE;
    void *found = mmap(NULL, size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    *address = (CUdeviceptr)found;
    return found == MAP_FAILED ? CUDA_ERROR_OUT_OF_MEMORY : CUDA_SUCCESS;
}

CUresult cuMemCreate(CUmemGenericAllocationHandle *handle, size_t size, const CUmemAllocationProp *prop,
                     unsigned long long flags) {
    if (!is_on_the_device(prop) || size % STEP || flags) return CUDA_ERROR_INVALID_VALUE;
    if (taken + size > room) return CUDA_ERROR_OUT_OF_MEMORY;
    int file = memfd_create("device", 0);
    if (file < 0 || ftruncate(file, (off_t)size)) return CUDA_ERROR_OUT_OF_MEMORY;
    *handle = 0x500000000 + file; /* needs more than 32 bits */
    return CUDA_SUCCESS;
}

CUresult cuMemMap(CUdeviceptr address, size_t size, size_t offset, CUmemGenericAllocationHandle handle,
                  unsigned long long flags) {
    if (offset || flags) return CUDA_ERROR_INVALID_VALUE;
    void *at = mmap((void *)address, size, PROT_NONE, MAP_SHARED | MAP_FIXED, (int)(handle - 0x500000000), 0);
    taken += size;
    return at == MAP_FAILED ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
}

CUresult cuMemSetAccess(CUdeviceptr address, size_t size, const CUmemAccessDesc *desc, size_t count) {
    if (count != 1 || desc->location.type != CU_MEM_LOCATION_TYPE_DEVICE || desc->location.id != 1 ||
        desc->flags != CU_MEM_ACCESS_FLAGS_PROT_READWRITE)
        return CUDA_ERROR_INVALID_VALUE;
    return mprotect((void *)address, size, PROT_READ | PROT_WRITE) ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
}

CUresult cuMemUnmap(CUdeviceptr address, size_t size) {
    taken -= size;
    void *at = mmap((void *)address, size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED | MAP_NORESERVE, -1, 0);
    return at == MAP_FAILED ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
}

CUresult cuMemRelease(CUmemGenericAllocationHandle handle) {
    return close((int)(handle - 0x500000000)) ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
}

CUresult cuMemAddressFree(CUdeviceptr address, size_t size) {
    return munmap((void *)address, size) ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
}
