// Descriptions of commands, as `engines/base/commands.py` writes them, read into commands.
#pragma once

#include "program.h"

#include <torch/csrc/Dtype.h>
#include <torch/csrc/utils/python_strings.h>

namespace assocscan {

// Fields of a tuple, in order. Descriptions come from `programs.py` only.
class Reader {
 public:
  explicit Reader(PyObject* tuple) : tuple_(tuple) {
    TORCH_CHECK(PyTuple_Check(tuple), "a tuple is expected");
  }
  PyObject* object() {
    TORCH_CHECK(at_ < PyTuple_GET_SIZE(tuple_), "a description is too short");
    return PyTuple_GET_ITEM(tuple_, at_++);
  }
  bool done() const { return at_ == PyTuple_GET_SIZE(tuple_); }
  int64_t integer() { return to_integer(object()); }
  template <typename T = int64_t>
  std::vector<T> integers() {
    std::vector<T> found;
    for (Reader parts(object()); !parts.done();) found.push_back(T(parts.integer()));
    return found;
  }
  std::vector<std::pair<int, int>> pairs() {
    std::vector<std::pair<int, int>> found;
    for (Reader parts(object()); !parts.done();) {
      Reader pair(parts.object());
      const int first = int(pair.integer());
      found.emplace_back(first, int(pair.integer()));
    }
    return found;
  }
  template <typename P>
  P* pointer() { return reinterpret_cast<P*>(PyLong_AsVoidPtr(object())); }

  static int64_t to_integer(PyObject* object) {
    const int64_t value = PyLong_AsLongLong(object);
    if (value == -1 && PyErr_Occurred()) throw python_error();
    return value;
  }

 private:
  PyObject* tuple_;
  Py_ssize_t at_ = 0;
};

inline c10::Device device_of(int64_t index) {
  return index < 0 ? c10::Device(c10::kCPU) : c10::Device(c10::kCUDA, c10::DeviceIndex(index));
}

inline at::ScalarType dtype_of(PyObject* object) { return reinterpret_cast<THPDtype*>(object)->scalar_type; }

// A constant argument of a function of torch: None, a bool, an integer, a float, a string, a dtype, or a
// tuple of integers or of bools.
inline c10::IValue constant_of(PyObject* object) {
  if (object == Py_None) return {};
  if (PyBool_Check(object)) return object == Py_True;
  if (PyFloat_Check(object)) return PyFloat_AS_DOUBLE(object);
  if (PyUnicode_Check(object)) return THPUtils_unpackString(object);
  if (THPDtype_Check(object)) return int64_t(dtype_of(object));
  if (!PyTuple_Check(object)) return Reader::to_integer(object);
  Reader parts(object);
  if (PyTuple_GET_SIZE(object) > 0 && PyBool_Check(PyTuple_GET_ITEM(object, 0))) {
    c10::List<bool> flags;
    while (!parts.done()) flags.push_back(parts.object() == Py_True);
    return flags;
  }
  c10::List<int64_t> numbers;
  while (!parts.done()) numbers.push_back(parts.integer());
  return numbers;
}

inline std::unique_ptr<Command> command_of(PyObject* description) {
  Reader fields(description);
  const std::string kind = THPUtils_unpackString(fields.object());
  if (kind == "allocate") {
    auto made = std::make_unique<Allocate>();
    made->slot = Slot(fields.integer());
    made->sizes = fields.integers(), made->strides = fields.integers();
    made->dtype = dtype_of(fields.object());
    made->device = device_of(fields.integer());
    made->huge_page = fields.integer();
    return made;
  }
  if (kind == "copy") {
    auto made = std::make_unique<Copy>();
    made->source = Slot(fields.integer()), made->slot = Slot(fields.integer());
    made->sizes = fields.integers(), made->strides = fields.integers();
    return made;
  }
  if (kind == "call") {
    auto made = std::make_unique<CallHost>();
    made->function = reinterpret_cast<int (*)(int64_t*)>(fields.pointer<void>());
    made->arguments = fields.integers();
    made->addresses = fields.pairs();
    made->is_long = fields.integer();
    return made;
  }
  if (kind == "offsets") {
    auto made = std::make_unique<CheckOffsets>();
    made->slot = Slot(fields.integer()), made->length = fields.integer();
    return made;
  }
  if (kind == "python") {
    auto made = std::make_unique<RunPython>();
    made->function = PyRef(fields.object());
    made->arguments = fields.integers<Slot>(), made->results = fields.integers<Slot>();
    return made;
  }
  if (kind == "torch") {
    const std::string name = THPUtils_unpackString(fields.object());
    const std::string overload = THPUtils_unpackString(fields.object());
    auto made = std::make_unique<CallTorch>(
        c10::Dispatcher::singleton().findSchemaOrThrow(name.c_str(), overload.c_str()));
    for (Reader parts(fields.object()); !parts.done();) {
      Reader one(parts.object());  // a slot or −1, and the constant
      made->arguments.emplace_back();
      made->arguments.back().slot = Slot(one.integer());
      made->arguments.back().constant = constant_of(one.object());
    }
    made->results = fields.integers<Slot>();
    return made;
  }
  if (kind == "triton") {
    auto made = std::make_unique<LaunchTriton>();
    made->slots = fields.integers<Slot>();
    made->integers = fields.integers();
    made->blocks = unsigned(fields.integer()), made->threads = unsigned(fields.integer());
    made->function = fields.pointer<void>();
    made->shared = unsigned(fields.integer());
    made->widths = fields.integers();
    return made;
  }
  TORCH_CHECK(kind == "cuda", "an unknown command: ", kind);
  auto made = std::make_unique<LaunchCuda>();
  made->function = fields.pointer<void>();
  made->device = device_of(fields.integer());
  made->grid = unsigned(fields.integer()), made->threads = unsigned(fields.integer());
  made->shared = unsigned(fields.integer());
  PyObject* structure = fields.object();
  made->structure = std::string(PyBytes_AS_STRING(structure), size_t(PyBytes_GET_SIZE(structure)));
  made->slots = fields.integers<Slot>();
  made->waits = fields.integer();
  made->header_bytes = fields.integer(), made->group_slots_at = fields.integer();
  made->alarm = fields.pointer<const volatile int32_t>();
  made->workspace = PyRef(fields.object());
  return made;
}

}  // namespace assocscan
