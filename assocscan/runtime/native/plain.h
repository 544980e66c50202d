// Which tensors and which surroundings a program may run in, and keys made of tensors.
#pragma once

#include <torch/csrc/autograd/python_variable.h>

#include <ATen/Parallel.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>
#include <c10/util/SmallVector.h>

#include <pthread.h>

#include <atomic>
#include <bit>
#include <mutex>

namespace assocscan {

using at::Tensor;

// Set by Python where a choice of the engines is overridden: nothing is then taken from a cache.
inline std::atomic<bool> bypassed{false};

// Whether tensors may not be what they seem, or what is done to them is recorded: a transform of
// torch.func, a dispatch mode, torch.jit.trace; also while a choice is overridden (`bypassed`).
inline bool is_surrounded() {
  const auto included = c10::impl::tls_local_dispatch_key_set().included_;
  return bypassed.load(std::memory_order_relaxed) ||
         included.has_any(c10::DispatchKeySet({c10::DispatchKey::FuncTorchDynamicLayerFrontMode,
                                               c10::DispatchKey::FuncTorchDynamicLayerBackMode,
                                               c10::DispatchKey::Functionalize,
                                               c10::DispatchKey::VmapMode,
                                               c10::DispatchKey::Python,
                                               c10::DispatchKey::Tracer})) ||
         c10::impl::dispatch_mode_enabled();
}

// Whether a tensor is ordinary memory on the CPU or a GPU: no lazy conjugation or negation, no
// wrapper of a transform, no tangent.
inline bool is_plain(const Tensor& t) {
  using c10::BackendComponent, c10::DispatchKey, c10::DispatchKeySet;
  const auto ordinary = [](DispatchKey key, BackendComponent backend) {
    return DispatchKeySet(key) | c10::getAutocastRelatedKeySetFromBackend(backend);
  };
  const auto tracked = [](BackendComponent backend) {  // which tensors of inference mode lack
    return c10::getAutogradRelatedKeySetFromBackend(backend) | DispatchKeySet(DispatchKey::ADInplaceOrView);
  };
  static const DispatchKeySet cpu = ordinary(DispatchKey::CPU, BackendComponent::CPUBit),
                              cuda = ordinary(DispatchKey::CUDA, BackendComponent::CUDABit),
                              tracked_cpu = cpu | tracked(BackendComponent::CPUBit),
                              tracked_cuda = cuda | tracked(BackendComponent::CUDABit);
  const DispatchKeySet keys = t.key_set();
  if (keys != tracked_cpu && keys != tracked_cuda && keys != cpu && keys != cuda) return false;
  return !t._fw_grad(0).defined();
}

// The lock of all caches of calls and of backward programs. It is held while a cache is looked up or
// changed, never while an entry is destroyed, because that may run Python code. A fork waits for it.
inline std::mutex& cache_lock() {
  static std::mutex lock;
  static const int registered = pthread_atfork([] { cache_lock().lock(); }, [] { cache_lock().unlock(); },
                                               [] { cache_lock().unlock(); });
  (void)registered;
  return lock;
}

// A list of numbers that describes a call; two calls with equal keys run the same program. Kernels load
// as many bytes at a time as addresses allow, so the alignment of each tensor is in it.
class Key {
 private:
  // The largest power of two up to 16 that divides its address, as 0 to 4. By const_data_ptr: data_ptr
  // would first copy a tensor whose memory is copied on write.
  static int64_t alignment_of(const Tensor& t) {
    return std::countr_zero(reinterpret_cast<uint64_t>(t.const_data_ptr()) | 16);
  }

 public:
  void push(int64_t word) { words_.push_back(word); }
  void push_metadata(const Tensor& t, bool needs_gradient) {
    push(int64_t(t.scalar_type()) | int64_t(t.device().type()) << 8 |
         int64_t(t.device().index() + 1) << 16 | int64_t(needs_gradient) << 24 | alignment_of(t) << 25 |
         t.dim() << 32);
    for (const int64_t n : t.sizes()) push(n);
    for (const int64_t s : t.strides()) push(s);
  }
  static Key invalid() {
    Key key;
    key.valid_ = false;
    return key;
  }
  bool valid() const { return valid_; }
  bool operator==(const Key& other) const { return words_ == other.words_; }
  size_t hash() const {
    uint64_t h = words_.size();
    for (const int64_t word : words_) h = (h ^ uint64_t(word)) * 0x9e3779b97f4a7c15ull, h ^= h >> 29;
    return h;
  }

 private:
  c10::SmallVector<int64_t, 48> words_;
  bool valid_ = true;
};

struct KeyHash {
  size_t operator()(const Key& key) const { return key.hash(); }
};

}  // namespace assocscan
