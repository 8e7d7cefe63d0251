/* Stands in for libcuda.so.1, which PyTorch loads by name when CUDA is first used, and for libnvidia-ml.so.1, which it
   asks about fabrics. Nothing is compiled or launched through it. */
#define SAYS(name, status) \
  int name(void) { return status; }
enum { SUCCESS = 0, NOT_SUPPORTED = 801, NVML_NOT_SUPPORTED = 3 };

SAYS(cuInit, SUCCESS)
SAYS(cuCtxSetCurrent, SUCCESS)
SAYS(cuDevicePrimaryCtxRetain, SUCCESS)
SAYS(cuModuleUnload, SUCCESS)
SAYS(cuFlushGPUDirectRDMAWrites, SUCCESS)
SAYS(cuModuleLoadData, NOT_SUPPORTED)
SAYS(cuModuleLoadDataEx, NOT_SUPPORTED)
SAYS(cuModuleGetFunction, NOT_SUPPORTED)
SAYS(cuLaunchKernel, NOT_SUPPORTED)
SAYS(cuLaunchKernelEx, NOT_SUPPORTED)
SAYS(cuLaunchCooperativeKernel, NOT_SUPPORTED)
SAYS(cuOccupancyMaxActiveBlocksPerMultiprocessor, NOT_SUPPORTED)
SAYS(cuLinkCreate, NOT_SUPPORTED)
SAYS(cuLinkAddData, NOT_SUPPORTED)
SAYS(cuLinkComplete, NOT_SUPPORTED)
SAYS(cuFuncSetAttribute, NOT_SUPPORTED)
SAYS(cuFuncGetAttribute, NOT_SUPPORTED)
SAYS(cuPointerGetAttribute, NOT_SUPPORTED)
SAYS(cuTensorMapEncodeTiled, NOT_SUPPORTED)
SAYS(nvmlInit_v2, SUCCESS)
SAYS(nvmlShutdown, SUCCESS)
SAYS(nvmlDeviceGetHandleByPciBusId_v2, SUCCESS)
SAYS(nvmlDeviceGetGpuFabricInfoV, NVML_NOT_SUPPORTED)
SAYS(nvmlDeviceGetNvLinkRemoteDeviceType, NVML_NOT_SUPPORTED)
SAYS(nvmlDeviceGetNvLinkRemotePciInfo_v2, NVML_NOT_SUPPORTED)
SAYS(nvmlSystemGetCudaDriverVersion_v2, NVML_NOT_SUPPORTED)

int cuCtxGetCurrent(void** context) {
  *context = (void*)1;
  return SUCCESS;
}

int cuDevicePrimaryCtxGetState(int device, unsigned* flags, int* active) {
  (void)device;
  if (flags) *flags = 0;
  *active = 1;
  return SUCCESS;
}

int cuDeviceGet(int* device, int ordinal) {
  *device = ordinal;
  return SUCCESS;
}

int cuDeviceGetAttribute(int* value, int attribute, int device) {
  (void)device;
  *value = attribute == 102; /* virtual memory, but no handles that could be shared */
  return SUCCESS;
}

int nvmlDeviceGetComputeRunningProcesses(void* device, unsigned* count, void* processes) {
  (void)device, (void)processes;
  *count = 0;
  return SUCCESS;
}

int cuGetErrorString(int status, const char** text) {
  (void)status;
  *text = "not in the stand-in for the driver";
  return SUCCESS;
}
