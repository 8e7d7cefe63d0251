// Stands in for libcudart: one card whose memory is the host's, whose streams are threads, and whose kernels are
// refused, since `host_ops.py` computes instead. Preloaded: what is not here goes to the runtime itself, which finds no
// card.
//
// Copies over the link and results of ops take time, more or less of it by chance, so that events pass in any order
// that is legal. Memory given back to the card is unmapped: whoever still reads it crashes. Not here: graphs, peers,
// several cards.
//
// Environment: STAND_IN_GIB, the card's memory; STAND_IN_GBPS, the link's speed; STAND_IN_LATE_US, the most that a copy
// or a result is late by; STAND_IN_SEED.
#include <cuda.h>
#include <cuda_runtime_api.h>
#include <dlfcn.h>
#include <sys/mman.h>
#include <unistd.h>

#include <chrono>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <thread>
#define EXPORT extern "C" __attribute__((visibility("default")))
using Clock = std::chrono::steady_clock;

namespace {
double env(const char* name, double otherwise) {
  const char* t = getenv(name);
  return t ? atof(t) : otherwise;
}
std::mutex& mutex() {
  static auto* m = new std::mutex;
  return *m;
}
std::condition_variable& changed() {
  static auto* c = new std::condition_variable;
  return *c;
}
thread_local cudaError_t last = cudaSuccess;
cudaError_t fail(cudaError_t e) {
  if (e != cudaSuccess && e != cudaErrorNotReady) last = e;
  return e;
}

struct EventState {
  unsigned long recorded = 0, done = 0;
  Clock::time_point when;
  bool timing = true;
};
using EventP = std::shared_ptr<EventState>;
struct CardEvent {
  EventP state;
};

struct CardStream {
  std::deque<std::function<void(std::unique_lock<std::mutex>&)>> work;
  bool busy = false;
  int priority = 0;
  std::mt19937 random;
  unsigned long long id;
  explicit CardStream(unsigned long long i) : random(unsigned(env("STAND_IN_SEED", 0)) + i), id(i) {
    std::thread([this] { run(); }).detach();
  }
  void run() {
    std::unique_lock<std::mutex> lock(mutex());
    for (;;) {
      changed().wait(lock, [this] { return !work.empty(); });
      auto job = std::move(work.front());
      work.pop_front();
      busy = true;
      job(lock);
      busy = false;
      changed().notify_all();
    }
  }
  bool idle() const { return work.empty() && !busy; }
};
std::map<cudaStream_t, CardStream*>& streams() {
  static auto* m = new std::map<cudaStream_t, CardStream*>;
  return *m;
}
unsigned long long next_id = 1;
CardStream& at(cudaStream_t s) {  // with the lock
  if (s == cudaStreamLegacy || s == cudaStreamPerThread) s = nullptr;
  auto& all = streams();
  auto it = all.find(s);
  if (it == all.end()) {
    if (s != nullptr) {
      fprintf(stderr, "stand-in: unknown stream %p\n", (void*)s);
      abort();
    }
    it = all.emplace(s, new CardStream(next_id++)).first;
  }
  return *it->second;
}
enum Kind { HOST = 1, DEVICE = 2 };
struct Range {
  size_t bytes;
  Kind kind;
};
std::map<uintptr_t, Range>& ranges() {
  static auto* m = new std::map<uintptr_t, Range>;
  return *m;
}
size_t used = 0;
size_t total() {
  static size_t t = size_t(env("STAND_IN_GIB", 8) * (1ull << 30));
  return t;
}
const Range* find(const void* p) {
  auto& r = ranges();
  auto it = r.upper_bound(uintptr_t(p));
  if (it == r.begin()) return nullptr;
  --it;
  if (uintptr_t(p) >= it->first + it->second.bytes) return nullptr;
  return &it->second;
}
void drain(std::unique_lock<std::mutex>& lock, CardStream& s) {
  changed().wait(lock, [&] { return s.idle(); });
}
void drain_all(std::unique_lock<std::mutex>& lock) {
  changed().wait(lock, [] {
    for (auto& s : streams())
      if (!s.second->idle()) return false;
    return true;
  });
}
void pause(CardStream& s, size_t bytes) {
  static double gbps = env("STAND_IN_GBPS", 4), late = env("STAND_IN_LATE_US", 200);
  double us = bytes / (gbps * 1e3) + std::uniform_real_distribution<>(0, late)(s.random);
  std::this_thread::sleep_for(std::chrono::nanoseconds(long(us * 1e3)));
}
}  // namespace

EXPORT cudaError_t cudaGetDeviceCount(int* n) {
  *n = 1;
  return cudaSuccess;
}
EXPORT cudaError_t cudaGetDevice(int* d) {
  *d = 0;
  return cudaSuccess;
}
EXPORT cudaError_t cudaSetDevice(int d) { return fail(d == 0 ? cudaSuccess : cudaErrorInvalidDevice); }
EXPORT cudaError_t cudaInitDevice(int, unsigned, unsigned) { return cudaSuccess; }
EXPORT cudaError_t cudaDriverGetVersion(int* v) {
  *v = 13000;
  return cudaSuccess;
}
EXPORT cudaError_t cudaRuntimeGetVersion(int* v) {
  *v = 13000;
  return cudaSuccess;
}
EXPORT cudaError_t cudaGetLastError() {
  auto e = last;
  last = cudaSuccess;
  return e;
}
EXPORT cudaError_t cudaPeekAtLastError() { return last; }
EXPORT cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
  if (least) *least = 0;
  if (greatest) *greatest = -5;
  return cudaSuccess;
}
EXPORT cudaError_t cudaDeviceCanAccessPeer(int* can, int, int) {
  *can = 0;
  return cudaSuccess;
}
EXPORT cudaError_t cudaDeviceSetLimit(cudaLimit, size_t) { return cudaSuccess; }
EXPORT cudaError_t cudaDeviceGetLimit(size_t* v, cudaLimit) {
  *v = 1024;
  return cudaSuccess;
}
EXPORT cudaError_t cudaDeviceGetPCIBusId(char* id, int len, int) {
  snprintf(id, len, "0000:01:00.0");
  return cudaSuccess;
}
EXPORT cudaError_t cudaGetDeviceProperties(cudaDeviceProp* p, int) {
  memset(p, 0, sizeof *p);
  strcpy(p->name, "Stand-in");
  for (int i = 0; i < 16; i++) p->uuid.bytes[i] = char(i + 1);
  p->totalGlobalMem = total();
  p->sharedMemPerBlock = 49152;
  p->regsPerBlock = 65536;
  p->warpSize = 32;
  p->maxThreadsPerBlock = 1024;
  p->maxThreadsDim[0] = p->maxThreadsDim[1] = 1024;
  p->maxThreadsDim[2] = 64;
  p->maxGridSize[0] = 2147483647;
  p->maxGridSize[1] = p->maxGridSize[2] = 65535;
  p->major = 9;
  p->minor = 0;
  p->multiProcessorCount = 132;
  p->maxThreadsPerMultiProcessor = 2048;
  p->sharedMemPerMultiprocessor = 233472;
  p->regsPerMultiprocessor = 65536;
  p->sharedMemPerBlockOptin = 232448;
  p->l2CacheSize = 52428800;
  p->pciBusID = 1;
  p->concurrentKernels = 1;
  p->unifiedAddressing = 1;
  p->asyncEngineCount = 3;
  return cudaSuccess;
}
EXPORT cudaError_t cudaDeviceGetAttribute(int* v, cudaDeviceAttr a, int) {
  switch (a) {
    case cudaDevAttrComputeCapabilityMajor:
      *v = 9;
      break;
    case cudaDevAttrMultiProcessorCount:
      *v = 132;
      break;
    case cudaDevAttrWarpSize:
      *v = 32;
      break;
    case cudaDevAttrMaxThreadsPerBlock:
      *v = 1024;
      break;
    default:
      *v = 0;
  }
  return cudaSuccess;
}
EXPORT cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode* m) {
  *m = cudaStreamCaptureModeGlobal;
  return cudaSuccess;
}
EXPORT cudaError_t cudaStreamIsCapturing(cudaStream_t, cudaStreamCaptureStatus* s) {
  *s = cudaStreamCaptureStatusNone;
  return cudaSuccess;
}
EXPORT cudaError_t cudaStreamGetCaptureInfo(cudaStream_t, cudaStreamCaptureStatus* s, unsigned long long* id,
                                            cudaGraph_t*, const cudaGraphNode_t**, const cudaGraphEdgeData**, size_t*) {
  *s = cudaStreamCaptureStatusNone;
  if (id) *id = 0;
  return cudaSuccess;
}
EXPORT cudaError_t cudaStreamGetCaptureInfo_v2(cudaStream_t, cudaStreamCaptureStatus* s, unsigned long long* id,
                                               cudaGraph_t*, const cudaGraphNode_t**, size_t*) {
  *s = cudaStreamCaptureStatusNone;
  if (id) *id = 0;
  return cudaSuccess;
}
EXPORT cudaError_t cudaStreamGetCaptureInfo_v3(cudaStream_t, cudaStreamCaptureStatus* s, unsigned long long* id,
                                               cudaGraph_t*, const cudaGraphNode_t**, const cudaGraphEdgeData**,
                                               size_t*) {
  *s = cudaStreamCaptureStatusNone;
  if (id) *id = 0;
  return cudaSuccess;
}
static CUresult refuse() { return CUDA_ERROR_NOT_SUPPORTED; }
EXPORT cudaError_t cudaGetDriverEntryPointByVersion(const char* name, void** f, unsigned, unsigned long long,
                                                    cudaDriverEntryPointQueryResult* r) {
  static void* driver = dlopen("libcuda.so.1", RTLD_NOW);
  *f = dlsym(RTLD_DEFAULT, name);  // those of virtual memory are below
  if (!*f) *f = dlsym(driver, name);
  if (!*f) *f = (void*)refuse;
  if (r) *r = cudaDriverEntryPointSuccess;
  return cudaSuccess;
}
EXPORT cudaError_t cudaGetDriverEntryPoint(const char* n, void** f, unsigned long long g,
                                           cudaDriverEntryPointQueryResult* r) {
  return cudaGetDriverEntryPointByVersion(n, f, 0, g, r);
}

EXPORT cudaError_t cudaStreamCreateWithPriority(cudaStream_t* out, unsigned, int priority) {
  std::unique_lock<std::mutex> lock(mutex());
  auto* s = new CardStream(next_id++);
  s->priority = priority;
  *out = reinterpret_cast<cudaStream_t>(s);
  streams()[*out] = s;
  return cudaSuccess;
}
EXPORT cudaError_t cudaStreamCreateWithFlags(cudaStream_t* out, unsigned f) {
  return cudaStreamCreateWithPriority(out, f, 0);
}
EXPORT cudaError_t cudaStreamCreate(cudaStream_t* out) { return cudaStreamCreateWithPriority(out, 0, 0); }
EXPORT cudaError_t cudaStreamDestroy(cudaStream_t) { return cudaSuccess; }
EXPORT cudaError_t cudaStreamGetPriority(cudaStream_t s, int* p) {
  std::unique_lock<std::mutex> lock(mutex());
  *p = at(s).priority;
  return cudaSuccess;
}
EXPORT cudaError_t cudaStreamGetId(cudaStream_t s, unsigned long long* id) {
  std::unique_lock<std::mutex> lock(mutex());
  *id = at(s).id;
  return cudaSuccess;
}
EXPORT cudaError_t cudaStreamQuery(cudaStream_t s) {
  std::unique_lock<std::mutex> lock(mutex());
  return at(s).idle() ? cudaSuccess : cudaErrorNotReady;
}
EXPORT cudaError_t cudaStreamSynchronize(cudaStream_t s) {
  std::unique_lock<std::mutex> lock(mutex());
  drain(lock, at(s));
  return cudaSuccess;
}
EXPORT cudaError_t cudaDeviceSynchronize() {
  std::unique_lock<std::mutex> lock(mutex());
  drain_all(lock);
  return cudaSuccess;
}
EXPORT cudaError_t cudaLaunchHostFunc(cudaStream_t s, cudaHostFn_t fn, void* data) {
  std::unique_lock<std::mutex> lock(mutex());
  at(s).work.push_back([=](std::unique_lock<std::mutex>& l) {
    l.unlock();
    fn(data);
    l.lock();
  });
  changed().notify_all();
  return cudaSuccess;
}

EXPORT cudaError_t cudaEventCreateWithFlags(cudaEvent_t* out, unsigned flags) {
  auto* e = new CardEvent{std::make_shared<EventState>()};
  e->state->timing = !(flags & cudaEventDisableTiming);
  *out = reinterpret_cast<cudaEvent_t>(e);
  return cudaSuccess;
}
EXPORT cudaError_t cudaEventCreate(cudaEvent_t* out) { return cudaEventCreateWithFlags(out, 0); }
EXPORT cudaError_t cudaEventDestroy(cudaEvent_t e) {
  delete reinterpret_cast<CardEvent*>(e);
  return cudaSuccess;
}
EXPORT cudaError_t cudaEventRecordWithFlags(cudaEvent_t e, cudaStream_t s, unsigned) {
  std::unique_lock<std::mutex> lock(mutex());
  EventP state = reinterpret_cast<CardEvent*>(e)->state;
  auto number = ++state->recorded;
  at(s).work.push_back([=](std::unique_lock<std::mutex>&) {
    state->done = number;
    state->when = Clock::now();
  });
  changed().notify_all();
  return cudaSuccess;
}
EXPORT cudaError_t cudaEventRecord(cudaEvent_t e, cudaStream_t s) { return cudaEventRecordWithFlags(e, s, 0); }
EXPORT cudaError_t cudaEventQuery(cudaEvent_t e) {
  std::unique_lock<std::mutex> lock(mutex());
  auto& state = *reinterpret_cast<CardEvent*>(e)->state;
  return state.done == state.recorded ? cudaSuccess : cudaErrorNotReady;
}
EXPORT cudaError_t cudaEventSynchronize(cudaEvent_t e) {
  std::unique_lock<std::mutex> lock(mutex());
  EventP state = reinterpret_cast<CardEvent*>(e)->state;
  auto number = state->recorded;
  changed().wait(lock, [&] { return state->done >= number; });
  return cudaSuccess;
}
EXPORT cudaError_t cudaStreamWaitEvent(cudaStream_t s, cudaEvent_t e, unsigned) {
  std::unique_lock<std::mutex> lock(mutex());
  EventP state = reinterpret_cast<CardEvent*>(e)->state;
  auto number = state->recorded;
  at(s).work.push_back([=](std::unique_lock<std::mutex>& l) { changed().wait(l, [&] { return state->done >= number; }); });
  changed().notify_all();
  return cudaSuccess;
}
EXPORT cudaError_t cudaEventElapsedTime(float* ms, cudaEvent_t a, cudaEvent_t b) {
  std::unique_lock<std::mutex> lock(mutex());
  auto &x = *reinterpret_cast<CardEvent*>(a)->state, &y = *reinterpret_cast<CardEvent*>(b)->state;
  if (!x.timing || !y.timing || !x.recorded || !y.recorded) return fail(cudaErrorInvalidResourceHandle);
  if (x.done != x.recorded || y.done != y.recorded) return fail(cudaErrorNotReady);
  *ms = std::chrono::duration<float, std::milli>(y.when - x.when).count();
  return cudaSuccess;
}
EXPORT cudaError_t cudaEventElapsedTime_v2(float* ms, cudaEvent_t a, cudaEvent_t b) {
  return cudaEventElapsedTime(ms, a, b);
}

EXPORT cudaError_t cudaMalloc(void** out, size_t n) {
  std::unique_lock<std::mutex> lock(mutex());
  if (used + n > total()) return fail(cudaErrorMemoryAllocation);
  void* p = mmap(nullptr, n, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (p == MAP_FAILED) return fail(cudaErrorMemoryAllocation);
  memset(p, 0xFF, n);
  used += n;
  ranges()[uintptr_t(p)] = {n, DEVICE};
  *out = p;
  return cudaSuccess;
}
EXPORT cudaError_t cudaFree(void* p) {
  if (!p) return cudaSuccess;
  std::unique_lock<std::mutex> lock(mutex());
  drain_all(lock);
  auto it = ranges().find(uintptr_t(p));
  if (it == ranges().end() || it->second.kind != DEVICE) return fail(cudaErrorInvalidValue);
  used -= it->second.bytes;
  munmap(p, it->second.bytes);
  ranges().erase(it);
  return cudaSuccess;
}
EXPORT cudaError_t cudaMemGetInfo(size_t* f, size_t* t) {
  std::unique_lock<std::mutex> lock(mutex());
  *t = total();
  *f = total() - used;
  return cudaSuccess;
}

// The driver's virtual memory, for expandable segments: addresses are reserved, and pieces of the card mapped onto them.
// Unmapping waits for nothing, as on a card.
static CUresult reserve(CUdeviceptr* p, size_t n, int flags) {
  void* at = mmap((void*)*p, n, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | flags, -1, 0);
  *p = CUdeviceptr(at);
  return at == MAP_FAILED ? CUDA_ERROR_OUT_OF_MEMORY : CUDA_SUCCESS;
}
EXPORT CUresult cuMemGetAllocationGranularity(size_t* n, const CUmemAllocationProp*, CUmemAllocationGranularity_flags) {
  *n = 2 << 20;
  return CUDA_SUCCESS;
}
EXPORT CUresult cuMemAddressReserve(CUdeviceptr* out, size_t n, size_t, CUdeviceptr, unsigned long long) {
  *out = 0;
  return reserve(out, n, 0);
}
EXPORT CUresult cuMemAddressFree(CUdeviceptr p, size_t n) {
  return munmap((void*)p, n) ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
}
EXPORT CUresult cuMemCreate(CUmemGenericAllocationHandle* out, size_t n, const CUmemAllocationProp*,
                            unsigned long long) {
  std::unique_lock<std::mutex> lock(mutex());
  if (used + n > total()) return CUDA_ERROR_OUT_OF_MEMORY;
  int file = memfd_create("card", MFD_CLOEXEC);
  if (file < 0 || ftruncate(file, n)) return CUDA_ERROR_OUT_OF_MEMORY;
  used += n;
  *out = file;
  return CUDA_SUCCESS;
}
EXPORT CUresult cuMemRelease(CUmemGenericAllocationHandle file) {
  std::unique_lock<std::mutex> lock(mutex());
  used -= lseek(int(file), 0, SEEK_END);
  close(int(file));
  return CUDA_SUCCESS;
}
EXPORT CUresult cuMemMap(CUdeviceptr p, size_t n, size_t offset, CUmemGenericAllocationHandle file,
                         unsigned long long) {
  std::unique_lock<std::mutex> lock(mutex());
  void* at = mmap((void*)p, n, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, int(file), offset);
  if (at == MAP_FAILED) return CUDA_ERROR_INVALID_VALUE;
  memset(at, 0xFF, n);
  ranges()[p] = {n, DEVICE};
  return CUDA_SUCCESS;
}
EXPORT CUresult cuMemSetAccess(CUdeviceptr, size_t, const CUmemAccessDesc*, size_t) { return CUDA_SUCCESS; }
EXPORT CUresult cuMemUnmap(CUdeviceptr p, size_t n) {
  std::unique_lock<std::mutex> lock(mutex());
  if (ranges().erase(p) != 1) return CUDA_ERROR_INVALID_VALUE;
  return reserve(&p, n, MAP_FIXED);
}
EXPORT cudaError_t cudaHostAlloc(void** out, size_t n, unsigned) {
  void* p = nullptr;
  if (posix_memalign(&p, 4096, n ? n : 1)) return fail(cudaErrorMemoryAllocation);
  std::unique_lock<std::mutex> lock(mutex());
  ranges()[uintptr_t(p)] = {n, HOST};
  *out = p;
  return cudaSuccess;
}
EXPORT cudaError_t cudaMallocHost(void** out, size_t n) { return cudaHostAlloc(out, n, 0); }
EXPORT cudaError_t cudaFreeHost(void* p) {
  std::unique_lock<std::mutex> lock(mutex());
  drain_all(lock);
  ranges().erase(uintptr_t(p));
  free(p);
  return cudaSuccess;
}
EXPORT cudaError_t cudaHostRegister(void* p, size_t n, unsigned) {
  std::unique_lock<std::mutex> lock(mutex());
  if (find(p)) return fail(cudaErrorHostMemoryAlreadyRegistered);
  ranges()[uintptr_t(p)] = {n, HOST};
  return cudaSuccess;
}
EXPORT cudaError_t cudaHostUnregister(void* p) {
  std::unique_lock<std::mutex> lock(mutex());
  auto it = ranges().find(uintptr_t(p));
  if (it == ranges().end()) return fail(cudaErrorHostMemoryNotRegistered);
  ranges().erase(it);
  return cudaSuccess;
}
EXPORT cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* a, const void* p) {
  std::unique_lock<std::mutex> lock(mutex());
  memset(a, 0, sizeof *a);
  auto* r = find(p);
  a->type = !r ? cudaMemoryTypeUnregistered : r->kind == DEVICE ? cudaMemoryTypeDevice : cudaMemoryTypeHost;
  a->device = r ? 0 : -2;
  a->devicePointer = r ? const_cast<void*>(p) : nullptr;
  a->hostPointer = r && r->kind == HOST ? const_cast<void*>(p) : nullptr;
  return cudaSuccess;
}
static cudaError_t copy(void* to, const void* from, size_t n, cudaStream_t s, bool wait) {
  if (!n) return cudaSuccess;
  std::unique_lock<std::mutex> lock(mutex());
  auto *a = find(to), *b = find(from);
  bool pageable = !a || !b, link = pageable || a->kind == HOST || b->kind == HOST;
  CardStream& stream = at(s);
  stream.work.push_back([=, &stream](std::unique_lock<std::mutex>& l) {
    l.unlock();
    if (link && !pageable) pause(stream, n);
    memmove(to, from, n);
    l.lock();
  });
  changed().notify_all();
  if (pageable || wait) drain(lock, stream);
  return cudaSuccess;
}
// A kernel's result, late. It is copied here: the caller's may be gone, or written to, by then.
EXPORT cudaError_t standInDeliver(void* to, const void* from, size_t n, cudaStream_t s) {
  std::shared_ptr<char[]> result(new char[n]);
  memcpy(result.get(), from, n);
  std::unique_lock<std::mutex> lock(mutex());
  CardStream& stream = at(s);
  stream.work.push_back([=, &stream](std::unique_lock<std::mutex>& l) {
    l.unlock();
    pause(stream, 0);
    memcpy(to, result.get(), n);
    l.lock();
  });
  changed().notify_all();
  return cudaSuccess;
}
EXPORT cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t n, cudaMemcpyKind, cudaStream_t s) {
  return copy(to, from, n, s, false);
}
EXPORT cudaError_t cudaMemcpy(void* to, const void* from, size_t n, cudaMemcpyKind) {
  return copy(to, from, n, nullptr, true);
}
EXPORT cudaError_t cudaMemsetAsync(void* to, int v, size_t n, cudaStream_t s) {
  std::unique_lock<std::mutex> lock(mutex());
  at(s).work.push_back([=](std::unique_lock<std::mutex>& l) {
    l.unlock();
    memset(to, v, n);
    l.lock();
  });
  changed().notify_all();
  return cudaSuccess;
}
EXPORT cudaError_t cudaMemset(void* to, int v, size_t n) {
  auto e = cudaMemsetAsync(to, v, n, nullptr);
  cudaStreamSynchronize(nullptr);
  return e;
}
EXPORT cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* a, const void*) {
  memset(a, 0, sizeof *a);
  a->maxThreadsPerBlock = 1024;
  return cudaSuccess;
}
EXPORT cudaError_t cudaFuncSetAttribute(const void*, cudaFuncAttribute, int) { return cudaSuccess; }
EXPORT cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int* n, const void*, int, size_t, unsigned) {
  *n = 2;
  return cudaSuccess;
}
EXPORT cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* n, const void*, int, size_t) {
  *n = 2;
  return cudaSuccess;
}
EXPORT cudaError_t cudaLaunchKernel(const void*, dim3, dim3, void**, size_t, cudaStream_t) {
  return fail(cudaErrorNotSupported);
}
EXPORT cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t*, const void*, void**) {
  return fail(cudaErrorNotSupported);
}
EXPORT cudaError_t __cudaLaunchKernel(cudaKernel_t, dim3, dim3, void**, size_t, cudaStream_t) {
  return fail(cudaErrorNotSupported);
}
EXPORT cudaError_t __cudaLaunchKernel_ptsz(cudaKernel_t, dim3, dim3, void**, size_t, cudaStream_t) {
  return fail(cudaErrorNotSupported);
}
EXPORT cudaError_t __cudaGetKernel(cudaKernel_t* k, const void* f) {
  *k = (cudaKernel_t)f;
  return cudaSuccess;
}
