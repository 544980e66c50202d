// The runner of executables in C++: the call cache, programs and the autograd node, for Python.
//
// Python describes executables to it (`programs.py`), inserts calls into its cache, and calls it first
// every time. It runs the calls of its cache and returns MISS for all others, which Python then runs.
#include "descriptions.h"
#include "gradient.h"
#include "plain.h"
#include "program.h"

namespace assocscan {
namespace {

PyObject* miss = nullptr;         // returned for a call that is not in the cache
PyObject* calls_name = nullptr;   // the attribute of a Monoid with its `Calls`
PyObject* native_name = nullptr;  // the attribute of a `Calls` with the `Calls` of this file
PyTypeObject *monoid_type = nullptr, *calls_type = nullptr;
constexpr const char* PROGRAM = "assocscan program";
constexpr const char* CALLS = "assocscan calls";

template <typename T>
PyObject* capsule(T value, const char* name) {
  auto* owned = new T(std::move(value));
  PyObject* made = PyCapsule_New(owned, name, nullptr);
  if (made == nullptr) {
    delete owned;
    return nullptr;
  }
  PyCapsule_SetDestructor(made, [](PyObject* object) {
    delete static_cast<T*>(PyCapsule_GetPointer(object, PyCapsule_GetName(object)));
  });
  return made;
}

template <typename T>
T& held(PyObject* object, const char* name) {
  auto* found = static_cast<T*>(PyCapsule_GetPointer(object, name));
  if (found == nullptr) throw python_error();
  return *found;
}

using ProgramPtr = std::shared_ptr<const Program>;

// program(slots, given, device, constants, commands, results)
PyObject* make_program(PyObject*, PyObject* arguments) {
  HANDLE_TH_ERRORS
  Reader fields(arguments);
  auto made = std::make_shared<Program>();
  made->slots = size_t(fields.integer()), made->given = size_t(fields.integer());
  made->device = device_of(fields.integer());
  for (Reader parts(fields.object()); !parts.done();) {
    Reader one(parts.object());
    const Slot slot = Slot(one.integer());
    made->constants.emplace_back(slot, THPVariable_Unpack(one.object()));
  }
  for (Reader parts(fields.object()); !parts.done();) made->commands.push_back(command_of(parts.object()));
  made->results = fields.integers<Slot>();
  return capsule<ProgramPtr>(std::move(made), PROGRAM);
  END_HANDLE_TH_ERRORS
}

// run(program, tensors): the list of results, or MISS. The tensors fit; None where one is not read.
PyObject* run(PyObject*, PyObject* const* arguments, Py_ssize_t) {
  HANDLE_TH_ERRORS
  const ProgramPtr& program = held<ProgramPtr>(arguments[0], PROGRAM);
  THPObjectPtr tensors(PySequence_Fast(arguments[1], "tensors"));
  if (!tensors) throw python_error();
  Table table;
  for (Py_ssize_t k = 0; k < PySequence_Fast_GET_SIZE(tensors.get()); ++k) {
    PyObject* t = PySequence_Fast_GET_ITEM(tensors.get(), k);
    table.push_back(t == Py_None ? Tensor() : THPVariable_Unpack(t));
  }
  try {
    program->run(table);
  } catch (const NeedsPython&) {
    Py_INCREF(miss);
    return miss;
  }
  THPObjectPtr found(PyList_New(Py_ssize_t(program->results.size())));
  for (size_t k = 0; k < program->results.size(); ++k)
    PyList_SET_ITEM(found.get(), k, THPVariable_Wrap(table[program->results[k]]));
  return found.release();
  END_HANDLE_TH_ERRORS
}

// ---- The call cache ----

// The structure of a result: nested tuples of the tensors, in order.
struct Structure {
  bool is_leaf = true;
  std::vector<Structure> parts;

  static Structure of(PyObject* description) {  // an integer for a leaf, a tuple of descriptions
    Structure made;
    made.is_leaf = !PyTuple_Check(description);
    if (!made.is_leaf)
      for (Reader fields(description); !fields.done();) made.parts.push_back(of(fields.object()));
    return made;
  }
  PyObject* build(const Tensor*& next) const {
    if (is_leaf) return THPVariable_Wrap(*next++);
    THPObjectPtr made(PyTuple_New(Py_ssize_t(parts.size())));
    for (size_t k = 0; k < parts.size(); ++k) {
      PyObject* part = parts[k].build(next);
      if (part == nullptr) throw python_error();
      PyTuple_SET_ITEM(made.get(), k, part);
    }
    return made.release();
  }
};

// A prepared call.
struct Call {
  ProgramPtr program;
  std::shared_ptr<Gradient> gradient;  // none if no gradient is wanted
  Structure structure;                 // of what is returned
  Slots returned;                      // which of the program's results, in the structure's order
};

struct Calls {
  static constexpr size_t MOST = 512;  // as in Python (`caching.bounded.MOST_CALLS`)
  std::unordered_map<Key, std::shared_ptr<const Call>, KeyHash> entries;
};

using CallsPtr = std::shared_ptr<Calls>;
using Tensors = c10::SmallVector<Tensor, 8>;

// Appends the tensors of nested tuples and their description; false where something else is met.
bool gather(PyObject* tree, bool grad, Tensors& tensors, Key& key) {
  if (THPVariable_CheckExact(tree)) {
    const Tensor& t = THPVariable_Unpack(tree);
    if (!is_plain(t)) return false;
    key.push_metadata(t, grad && t.requires_grad());
    tensors.push_back(t);
    return true;
  }
  if (!PyTuple_CheckExact(tree)) return false;
  const Py_ssize_t size = PyTuple_GET_SIZE(tree);
  key.push(-1 - size);
  for (Py_ssize_t k = 0; k < size; ++k)
    if (!gather(PyTuple_GET_ITEM(tree, k), grad, tensors, key)) return false;
  return true;
}

// The arguments of a call after op: xs, axis, reverse, inclusive, init, return_final, backend; and
// offsets, None where there are none. False where such a call is not cached.
bool describe(PyObject* const* arguments, PyObject* offsets, Tensors& tensors, Key& key) {
  if (!PyLong_CheckExact(arguments[1])) return false;
  for (const int k : {2, 3, 5})
    if (!PyBool_Check(arguments[k])) return false;
  int overflow = 0;
  const long axis = PyLong_AsLongAndOverflow(arguments[1], &overflow);
  if (overflow || !PyUnicode_CheckExact(arguments[6])) return false;
  key.push(axis);
  key.push(int64_t(arguments[2] == Py_True) | int64_t(arguments[3] == Py_True) << 1 |
           int64_t(arguments[5] == Py_True) << 2 | int64_t(arguments[4] != Py_None) << 3 |
           int64_t(offsets != Py_None) << 4 |
           int64_t(c10::get_default_dtype_as_scalartype()) << 8 | int64_t(at::get_num_threads()) << 16);
  key.push(PyObject_Hash(arguments[6]));  // a hash is enough: only calls with valid names are inserted
  const bool grad = at::GradMode::is_enabled();
  if (!gather(arguments[0], grad, tensors, key)) return false;
  if (arguments[4] != Py_None && !gather(arguments[4], grad, tensors, key)) return false;
  return offsets == Py_None || (THPVariable_CheckExact(offsets) && gather(offsets, grad, tensors, key));
}

PyObject* missed() {
  Py_INCREF(miss);
  return miss;
}

PyObject* run_call(const Call& call, const Tensors& tensors) {
  const Program& program = *call.program;
  Table table(tensors.begin(), tensors.end());
  try {
    program.run(table);
  } catch (const NeedsPython&) {
    return missed();
  }
  if (call.gradient) {
    Tensors results;
    for (const Slot slot : program.results) results.push_back(table[slot]);
    connect(call.gradient, tensors, results);
  }
  Tensors returned;
  for (const Slot k : call.returned) returned.push_back(table[program.results[k]]);
  const Tensor* next = returned.data();
  return call.structure.build(next);
}

// call(op, xs, axis, reverse, inclusive, init, return_final, backend, offsets=None): the result, or
// MISS. `op` may be the `Calls` of a function, whose tensors are xs.
PyObject* call(PyObject*, PyObject* const* arguments, Py_ssize_t count) {
  HANDLE_TH_ERRORS
  PyObject* op = arguments[0];
  THPObjectPtr calls_of_op;
  if (!Py_IS_TYPE(op, calls_type)) {
    if (!PyObject_TypeCheck(op, monoid_type)) return missed();
    calls_of_op = PyObject_GetAttr(op, calls_name);
    if (!calls_of_op) throw python_error();
    op = calls_of_op.get();
  }
  THPObjectPtr native(PyObject_GetAttr(op, native_name));
  if (!native) throw python_error();
  if (native.get() == Py_None || is_surrounded()) return missed();
  Key key;
  Tensors tensors;
  if (!describe(arguments + 1, count > 8 ? arguments[8] : Py_None, tensors, key)) return missed();
  std::shared_ptr<const Call> found;
  {
    Calls& calls = *held<CallsPtr>(native.get(), CALLS);
    const std::lock_guard<std::mutex> lock(cache_lock());
    const auto entry = calls.entries.find(key);
    if (entry == calls.entries.end()) return missed();
    found = entry->second;
  }
  return run_call(*found, tensors);
  END_HANDLE_TH_ERRORS
}

// insert_call(calls, xs, axis, reverse, inclusive, init, return_final, backend, offsets, program,
//             gradient, structure, returned). gradient: None, or (differentiable, in_python, reads,
// saved_results, integers, name). Returns whether all other calls were dropped to make room.
PyObject* insert_call(PyObject*, PyObject* const* arguments, Py_ssize_t) {
  HANDLE_TH_ERRORS
  Key key;
  Tensors tensors;
  if (!describe(arguments + 1, arguments[8], tensors, key)) Py_RETURN_NONE;
  auto made = std::make_shared<Call>();
  made->program = held<ProgramPtr>(arguments[9], PROGRAM);
  if (arguments[10] != Py_None) {
    Reader fields(arguments[10]);
    made->gradient = std::make_shared<Gradient>();
    made->gradient->differentiable = PyRef(fields.object());
    made->gradient->in_python = PyRef(fields.object());
    made->gradient->reads = fields.integers<bool>();
    made->gradient->saved_results = fields.integers<Slot>();
    made->gradient->is_integer.resize(made->program->results.size());
    for (const Slot k : fields.integers<Slot>()) made->gradient->is_integer[k] = true;
    made->gradient->name = THPUtils_unpackString(fields.object());
  }
  made->structure = Structure::of(arguments[11]);
  for (Reader parts(arguments[12]); !parts.done();) made->returned.push_back(Slot(parts.integer()));
  Calls& calls = *held<CallsPtr>(arguments[0], CALLS);
  std::unordered_map<Key, std::shared_ptr<const Call>, KeyHash> dropped;
  std::shared_ptr<const Call> replaced = std::move(made);
  {
    const std::lock_guard<std::mutex> lock(cache_lock());
    if (calls.entries.size() >= Calls::MOST) dropped.swap(calls.entries);
    calls.entries[key].swap(replaced);
  }
  return PyBool_FromLong(!dropped.empty());
  END_HANDLE_TH_ERRORS
}

// insert_backward(gradient, needed, given, program, results)
PyObject* insert_backward(PyObject*, PyObject* const* arguments, Py_ssize_t) {
  HANDLE_TH_ERRORS
  auto& gradient = held<std::shared_ptr<Gradient>>(arguments[0], ScanBackward::CAPSULE);
  std::vector<bool> needed;
  for (Reader parts(arguments[1]); !parts.done();) needed.push_back(parts.integer());
  Tensors given;
  for (Reader parts(arguments[2]); !parts.done();) {
    PyObject* t = parts.object();
    given.push_back(t == Py_None ? Tensor() : THPVariable_Unpack(t));
  }
  const Key key = backward_key(needed, given);
  if (!key.valid()) Py_RETURN_NONE;
  auto made = std::make_shared<BackwardProgram>();
  made->program = held<ProgramPtr>(arguments[3], PROGRAM);
  for (Reader parts(arguments[4]); !parts.done();) made->results.push_back(Slot(parts.integer()));
  gradient->insert(key, std::move(made));
  Py_RETURN_NONE;
  END_HANDLE_TH_ERRORS
}

PyObject* new_calls(PyObject*, PyObject*) {
  HANDLE_TH_ERRORS
  return capsule<CallsPtr>(std::make_shared<Calls>(), CALLS);
  END_HANDLE_TH_ERRORS
}

PyObject* set_bypassed(PyObject*, PyObject* value) {
  bypassed = PyObject_IsTrue(value);
  Py_RETURN_NONE;
}

// set_up(Monoid, Calls, error, MISS): `answered_by_python` and `miss`.
PyObject* set_up(PyObject*, PyObject* const* arguments, Py_ssize_t) {
  monoid_type = reinterpret_cast<PyTypeObject*>(Py_NewRef(arguments[0]));
  calls_type = reinterpret_cast<PyTypeObject*>(Py_NewRef(arguments[1]));
  answered_by_python = Py_NewRef(arguments[2]);
  miss = Py_NewRef(arguments[3]);
  Py_RETURN_NONE;
}

template <typename F>
PyCFunction as_function(F* function) {
  return reinterpret_cast<PyCFunction>(reinterpret_cast<void*>(function));
}

PyMethodDef methods[] = {
    {"program", make_program, METH_VARARGS, nullptr},
    {"run", as_function(run), METH_FASTCALL, nullptr},
    {"call", as_function(call), METH_FASTCALL, nullptr},
    {"insert_call", as_function(insert_call), METH_FASTCALL, nullptr},
    {"insert_backward", as_function(insert_backward), METH_FASTCALL, nullptr},
    {"new_calls", new_calls, METH_NOARGS, nullptr},
    {"set_bypassed", set_bypassed, METH_O, nullptr},
    {"set_up", as_function(set_up), METH_FASTCALL, nullptr},
    {nullptr, nullptr, 0, nullptr},
};

PyModuleDef definition = {PyModuleDef_HEAD_INIT, "assocscan_runner", nullptr, -1, methods};

}  // namespace
}  // namespace assocscan

PyMODINIT_FUNC PyInit_assocscan_runner() {
  using namespace assocscan;
  PyObject* module = PyModule_Create(&definition);
  if (module == nullptr) return nullptr;
  calls_name = PyUnicode_InternFromString("calls"), native_name = PyUnicode_InternFromString("native");
  return calls_name == nullptr || native_name == nullptr ? nullptr : module;
}
