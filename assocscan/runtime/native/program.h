// `Program`: the commands of an executable (`engines/base/executable.py`), run without Python.
//
// A program does what `Executable.run` does, on tensors with the shapes, strides and alignments that it
// was prepared for. Where it cannot (a capture of a CUDA graph that needs a new workspace, a C++ kernel
// that finds no memory for its buffers), it throws NeedsPython, and the caller runs the executable in
// Python, which gives the result or the error.
#pragma once

#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/utils/object_ptr.h>

#include <ATen/EmptyTensor.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/empty_strided.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <c10/util/SmallVector.h>

#include <dlfcn.h>
#include <sys/mman.h>

#include <atomic>
#include <cstring>
#include <memory>
#include <mutex>
#include <unordered_map>
#include <vector>

namespace assocscan {

using at::Tensor;
using Slot = int;
using Slots = std::vector<Slot>;
using Sizes = std::vector<int64_t>;
using Table = c10::SmallVector<Tensor, 16>;  // the tensor of each slot; undefined where not read

struct NeedsPython {};

// The class of errors after which the runner in Python is asked: BackendError.
inline PyObject* answered_by_python = nullptr;

// After a call of Python that raised: NeedsPython for this class. Others, such as KeyboardInterrupt, go
// to the caller.
[[noreturn]] inline void throw_after_python() {
  if (PyErr_ExceptionMatches(answered_by_python)) {
    PyErr_Clear();
    throw NeedsPython();
  }
  python_error error;
  error.persist();
  throw std::move(error);
}

// An owned Python object. It may be released on a thread without the GIL.
class PyRef {
 public:
  PyRef() = default;
  explicit PyRef(PyObject* borrowed) : object_(borrowed) { Py_XINCREF(object_); }
  PyRef(PyRef&& other) noexcept : object_(std::exchange(other.object_, nullptr)) {}
  PyRef& operator=(PyRef&& other) noexcept { std::swap(object_, other.object_); return *this; }
  ~PyRef() {
    if (object_ == nullptr || !Py_IsInitialized()) return;
    const PyGILState_STATE state = PyGILState_Ensure();
    Py_DECREF(object_);
    PyGILState_Release(state);
  }
  PyObject* get() const { return object_; }
  bool is_none() const { return object_ == nullptr || object_ == Py_None; }

 private:
  PyObject* object_ = nullptr;
};

struct WithGil {
  WithGil() : state(PyGILState_Ensure()) {}
  ~WithGil() { PyGILState_Release(state); }
  PyGILState_STATE state;
};

// The GIL is released in this scope, if this thread has it.
struct WithoutGil {
  explicit WithoutGil(bool wanted) : saved(wanted && PyGILState_Check() ? PyEval_SaveThread() : nullptr) {}
  ~WithoutGil() { if (saved) PyEval_RestoreThread(saved); }
  PyThreadState* saved;
};

// The address that a kernel is given. By const_data_ptr: data_ptr would first copy an input whose
// memory is copied on write.
inline int64_t address_of(const Tensor& t) {
  const auto address = reinterpret_cast<int64_t>(t.const_data_ptr());
  if (address == 0 && t.numel() > 0) throw NeedsPython();
  return address;
}

struct Command {
  virtual ~Command() = default;
  // Called before the first command runs: throws NeedsPython if this one will not be able to run.
  virtual void check() const {}
  virtual void run(Table& table) const = 0;
};

using Commands = std::vector<std::unique_ptr<Command>>;

struct Allocate : Command {
  Slot slot;
  Sizes sizes, strides;
  at::ScalarType dtype;
  c10::Device device = c10::kCPU;
  int64_t huge_page = 0;  // ask for huge pages of this size; 0: do not
  mutable std::atomic<c10::Allocator*> allocator{nullptr};  // torch's, for GPUs

  void run(Table& table) const override {
    if (!device.is_cpu()) {
      table[slot] = on_gpu();
      return;
    }
    table[slot] = Tensor(at::detail::empty_strided_cpu(sizes, strides, dtype));
    if (huge_page) ask_for_huge_pages(table[slot]);
  }

  // Past the first time torch's dispatcher is left out: it takes longer than the allocation.
  Tensor on_gpu() const {
    c10::Allocator* found = allocator.load(std::memory_order_relaxed);
    if (found != nullptr)
      return Tensor(at::detail::empty_strided_generic(
          sizes, strides, found, c10::DispatchKeySet(c10::DispatchKey::CUDA), dtype));
    Tensor made = at::empty_strided(sizes, strides, at::TensorOptions(device).dtype(dtype));
    allocator = made.storage().allocator();
    return made;
  }

  void ask_for_huge_pages(const Tensor& t) const {
#ifdef MADV_HUGEPAGE
    const auto start = reinterpret_cast<int64_t>(t.data_ptr());
    const int64_t begin = (start + huge_page - 1) / huge_page * huge_page;
    const int64_t end = (start + int64_t(t.storage().nbytes())) / huge_page * huge_page;
    if (end > begin) madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE);
#endif
  }
};

struct Copy : Command {
  Slot source, slot;
  Sizes sizes, strides;

  void run(Table& table) const override {
    const Tensor& from = table[source];
    Tensor to = at::empty_strided(sizes, strides, from.options());
    table[slot] = to.copy_(from.expand(sizes));
  }
};

// A function of the CPU engine: its argument is one array, a template with addresses filled in.
struct CallHost : Command {
  int (*function)(int64_t*);
  Sizes arguments;
  std::vector<std::pair<int, Slot>> addresses;
  bool is_long = false;  // long enough that other Python threads should run meanwhile

  void run(Table& table) const override {
    c10::SmallVector<int64_t, 64> given(arguments.begin(), arguments.end());
    for (const auto& [position, slot] : addresses) given[position] = address_of(table[slot]);
    WithoutGil without(is_long);
    if (function(given.data()) != 0) throw NeedsPython();
  }
};

// Checks the offsets of packed sequences in the CPU's memory. Python says what is wrong.
struct CheckOffsets : Command {
  Slot slot;
  int64_t length;

  void run(Table& table) const override {
    const Tensor& offsets = table[slot];
    const int64_t count = offsets.numel();
    const auto* values = static_cast<const int64_t*>(offsets.const_data_ptr());
    bool right = values[0] == 0 && values[count - 1] == length;
    for (int64_t k = 1; k < count; ++k) right &= values[k - 1] <= values[k];
    if (!right) throw NeedsPython();
  }
};

// A Python function of tensors that returns tensors.
struct RunPython : Command {
  PyRef function;
  Slots arguments, results;

  void run(Table& table) const override {
    WithGil gil;
    THPObjectPtr given(PyTuple_New(Py_ssize_t(arguments.size())));
    for (size_t k = 0; k < arguments.size(); ++k)
      PyTuple_SET_ITEM(given.get(), k, THPVariable_Wrap(table[arguments[k]]));
    THPObjectPtr found(PyObject_CallObject(function.get(), given.get()));
    THPObjectPtr list(found ? PySequence_Fast(found.get(), "tensors") : nullptr);
    if (!list) throw_after_python();
    if (PySequence_Fast_GET_SIZE(list.get()) != Py_ssize_t(results.size())) throw NeedsPython();
    for (size_t k = 0; k < results.size(); ++k)
      table[results[k]] = THPVariable_Unpack(PySequence_Fast_GET_ITEM(list.get(), k));
  }
};

// A function of torch, by its name in the dispatcher.
struct CallTorch : Command {
  // A tensor by its slot, or a constant where `slot` is negative.
  struct Argument {
    Slot slot = -1;
    c10::IValue constant;
  };
  c10::OperatorHandle function;
  std::vector<Argument> arguments;
  Slots results;  // −1: dropped

  explicit CallTorch(c10::OperatorHandle named) : function(std::move(named)) {}

  void run(Table& table) const override {
    torch::jit::Stack stack;
    for (const Argument& one : arguments) {
      if (one.slot < 0) stack.push_back(one.constant);
      else stack.push_back(table[one.slot].defined() ? c10::IValue(table[one.slot]) : c10::IValue());
    }
    const auto& expected = function.schema().arguments();
    for (size_t k = stack.size(); k < expected.size(); ++k) stack.push_back(*expected[k].default_value());
    function.callBoxed(stack);
    for (size_t k = 0; k < results.size(); ++k)
      if (results[k] >= 0) table[results[k]] = std::move(stack[k]).toTensor();
  }
};

// ---- Launches of CUDA kernels, through the driver ----

using Handle = void*;

struct Driver {
  int (*launch)(Handle, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned,
                Handle, void**, void**) = nullptr;
  int (*launch_cooperative)(Handle, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned,
                            unsigned, Handle, void**) = nullptr;
  int (*is_capturing)(Handle, int*) = nullptr;

  static const Driver& get() {
    static const Driver driver;
    return driver;
  }

 private:
  Driver() {
    void* library = dlopen("libcuda.so.1", RTLD_NOW);
    if (library == nullptr) return;
    launch = reinterpret_cast<decltype(launch)>(dlsym(library, "cuLaunchKernel"));
    launch_cooperative = reinterpret_cast<decltype(launch_cooperative)>(
        dlsym(library, "cuLaunchCooperativeKernel"));
    is_capturing = reinterpret_cast<decltype(is_capturing)>(dlsym(library, "cuStreamIsCapturing"));
  }
};

inline Handle stream_of(const c10::Device& device) {
  return reinterpret_cast<Handle>(
      c10::impl::VirtualGuardImpl(device.type()).getStream(device).native_handle());
}

// A kernel of Triton.
struct LaunchTriton : Command {
  Handle function;
  Slots slots;
  Sizes integers;  // and floats, by their bits
  Sizes widths;    // of each integer: 4 or 8 bytes; 0 if it is written into the kernel
  unsigned blocks, threads, shared;

  void run(Table& table) const override {
    c10::SmallVector<int64_t, 48> values;
    for (const Slot slot : slots) values.push_back(address_of(table[slot]));
    // A 4-byte parameter is read from the first bytes of its 8: this machine is little-endian.
    for (size_t k = 0; k < integers.size(); ++k)
      if (widths[k]) values.push_back(integers[k]);
    values.push_back(0), values.push_back(0);  // Triton's two scratch buffers, which are not used
    c10::SmallVector<void*, 48> parameters;
    for (int64_t& value : values) parameters.push_back(&value);
    if (Driver::get().launch(function, blocks, 1, 1, threads, 1, 1, shared,
                             stream_of(table[slots[0]].device()), parameters.data(), nullptr))
      throw NeedsPython();
  }
};

// A kernel of the CUDA engine (`cuda/`): its parameter is one structure.
struct LaunchCuda : Command {
  // The memory through which blocks exchange prefixes, by stream. A tensor lives as long as this
  // command, also when Python has made a larger one for the stream.
  struct Workspaces {
    std::mutex mutex;
    std::unordered_map<Handle, Tensor> by_stream;
  };
  Handle function;
  c10::Device device = c10::kCPU;
  unsigned grid, threads, shared;
  std::string structure;  // with zeros where addresses and the workspace are filled in
  Slots slots;            // of the addresses at its start; −1: address 0
  bool waits;             // blocks wait for each other: needs a workspace
  int64_t header_bytes, group_slots_at;
  const volatile int32_t* alarm;  // null where kernels tell the host nothing
  PyRef workspace;  // () → the workspace's tensor for the current stream
  std::unique_ptr<Workspaces> spaces = std::make_unique<Workspaces>();

  void check() const override {
    if (alarm != nullptr && *alarm != 0) throw NeedsPython();
    int capturing = 0;
    if (waits && (Driver::get().is_capturing(stream_of(device), &capturing) || capturing))
      throw NeedsPython();
  }

  void run(Table& table) const override {
    c10::SmallVector<int64_t, 128> filled((structure.size() + 7) / 8);
    std::memcpy(filled.data(), structure.data(), structure.size());
    int64_t* words = filled.data();
    for (const Slot slot : slots) *words++ = slot < 0 ? 0 : address_of(table[slot]);
    const Handle stream = stream_of(device);
    if (waits) {
      const Tensor space = workspace_of(stream);
      const int64_t header = address_of(space), at = header + header_bytes;
      words[0] = header, words[1] = at, words[2] = at + group_slots_at;
      words[4] = space.numel() - header_bytes;
    }
    if (alarm != nullptr) words[3] = reinterpret_cast<int64_t>(alarm);
    void* parameters[] = {filled.data()};
    const Driver& driver = Driver::get();
    const int error =
        waits ? driver.launch_cooperative(function, grid, 1, 1, threads, 1, 1, shared, stream, parameters)
              : driver.launch(function, grid, 1, 1, threads, 1, 1, shared, stream, parameters, nullptr);
    if (error) throw NeedsPython();
  }

  Tensor workspace_of(Handle stream) const {
    {
      const std::lock_guard<std::mutex> lock(spaces->mutex);
      const auto found = spaces->by_stream.find(stream);
      if (found != spaces->by_stream.end()) return found->second;
    }
    WithGil gil;
    THPObjectPtr made(PyObject_CallNoArgs(workspace.get()));
    if (!made) throw_after_python();
    const Tensor space = THPVariable_Unpack(made.get());
    const std::lock_guard<std::mutex> lock(spaces->mutex);
    return spaces->by_stream.emplace(stream, space).first->second;
  }
};

class Program {
 public:
  size_t slots = 0, given = 0;  // how many there are, and how many are of the given tensors
  c10::Device device = c10::kCPU;
  std::vector<std::pair<Slot, Tensor>> constants;
  Commands commands;
  Slots results;  // outputs, then finals

  // `table` begins with the given tensors; afterwards it holds the results too.
  void run(Table& table) const {
    table.resize(slots);
    for (const auto& [slot, t] : constants) table[slot] = t;
    const at::AutoDispatchBelowADInplaceOrView below;
    const c10::OptionalDeviceGuard guard(device.is_cpu() ? std::nullopt : std::make_optional(device));
    for (const auto& command : commands) command->check();
    for (const auto& command : commands) command->run(table);
  }
};

}  // namespace assocscan
