// The autograd node of a scan or of a function whose gradient is a list of commands.
//
// It saves what `saved` of its `Differentiable` (`runtime/autograd.py`) saves, in the same order, and runs the backward program that
// was registered for these needed gradients and this layout of saved tensors and cotangents. For everything else (the first backward, a
// gradient of the gradient, batched cotangents, tensor subclasses, transforms, dispatch modes) it
// calls the Python function that does the same.
#pragma once

#include "plain.h"
#include "program.h"

#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/saved_variable.h>

#include <algorithm>
#include <unordered_map>

namespace assocscan {

using torch::autograd::SavedVariable;
using torch::autograd::variable_list;

// A backward program for one layout of the saved tensors and the cotangents.
struct BackwardProgram {
  std::shared_ptr<const Program> program;  // of the saved tensors, then the cotangents
  Slots results;  // which of the program's results is the gradient of tensor k; −1: none
};

// What all nodes of one prepared call share.
struct Gradient {
  PyRef differentiable;          // of `runtime/autograd.py`
  PyRef in_python;               // (differentiable, this as a capsule, saved, needed, cotangents) → gradients
  std::vector<bool> reads;       // which of the tensors are saved
  Slots saved_results;           // which of the results are saved after them
  std::vector<bool> is_integer;  // which of the results have no derivative
  std::string name;              // of the node

  std::shared_ptr<const BackwardProgram> find(const Key& key) const {
    const std::lock_guard<std::mutex> lock(cache_lock());
    const auto found = programs.find(key);
    return found == programs.end() ? nullptr : found->second;
  }
  void insert(const Key& key, std::shared_ptr<const BackwardProgram> program) {
    Programs dropped;
    const std::lock_guard<std::mutex> lock(cache_lock());
    if (programs.size() >= MOST) dropped.swap(programs);
    programs[key].swap(program);
  }

 private:
  using Programs = std::unordered_map<Key, std::shared_ptr<const BackwardProgram>, KeyHash>;
  static constexpr size_t MOST = 64;
  Programs programs;
};

// The key of a backward program; not valid where a tensor is not plain.
template <typename Needed>
Key backward_key(const Needed& needed, c10::ArrayRef<Tensor> given) {
  Key key;
  for (const bool n : needed) key.push(n);
  for (const Tensor& t : given) {
    if (!t.defined()) {
      key.push(-1);
      continue;
    }
    if (!is_plain(t)) return Key::invalid();
    key.push_metadata(t, false);
  }
  return key;
}

// Whether saved results are aligned as kernels wrote them: a hook on saved tensors may give back others.
inline bool are_aligned(c10::ArrayRef<Tensor> results) {
  constexpr uintptr_t alignment = 64;  // of torch's CPU memory
  return std::all_of(results.begin(), results.end(), [](const Tensor& t) {
    return t.defined() && reinterpret_cast<uintptr_t>(t.const_data_ptr()) % alignment == 0;
  });
}

struct ScanBackward : torch::autograd::Node {
  std::shared_ptr<Gradient> gradient;
  std::vector<SavedVariable> saved;

  std::string name() const override { return gradient->name; }
  void release_variables() override {
    const std::lock_guard<std::mutex> lock(mutex_);
    for (SavedVariable& one : saved) one.reset_data();
  }

  variable_list apply(variable_list&& cotangents) override {
    const size_t count = gradient->reads.size();
    c10::SmallVector<bool, 8> needed;
    for (size_t k = 0; k < count; ++k) needed.push_back(task_should_compute_output(k));
    bool any = false;
    for (const Tensor& g : cotangents) any |= g.defined();
    if (!any) return variable_list(count);
    c10::SmallVector<Tensor, 16> given;
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      for (const SavedVariable& one : saved) given.push_back(one.unpack(self()));
    }
    given.append(cotangents.begin(), cotangents.end());
    if (!at::GradMode::is_enabled() && !is_surrounded()) {
      const Key key = backward_key(needed, given);
      const bool is_usual = key.valid() && are_aligned({given.data() + count, saved.size() - count});
      const auto found = is_usual ? gradient->find(key) : nullptr;
      if (found) {
        try {
          return run(*found, given, count);
        } catch (const NeedsPython&) {
        }
      }
    }
    return run_in_python(given, needed, count);
  }

 private:
#ifdef SHARED_NODES  // torch before 2.13
  std::shared_ptr<Node> self() { return getptr(); }
#else
  c10::intrusive_ptr<Node> self() { return getptr(); }
#endif

  static variable_list run(const BackwardProgram& found, c10::ArrayRef<Tensor> given, size_t count) {
    Table table(given.begin(), given.end());
    found.program->run(table);
    variable_list gradients(count);
    for (size_t k = 0; k < count; ++k)
      if (found.results[k] >= 0) gradients[k] = table[found.program->results[found.results[k]]];
    return gradients;
  }

  variable_list run_in_python(c10::ArrayRef<Tensor> given, c10::ArrayRef<bool> needed, size_t count) {
    WithGil gil;
    const size_t count_saved = saved.size();
    const auto tuple = [&](size_t begin, size_t end) {
      THPObjectPtr made(PyTuple_New(Py_ssize_t(end - begin)));
      for (size_t k = begin; k < end; ++k)
        PyTuple_SET_ITEM(made.get(), k - begin, THPVariable_Wrap(given[k]));
      return made;
    };
    THPObjectPtr saved_tensors = tuple(0, count_saved), cotangents = tuple(count_saved, given.size());
    THPObjectPtr flags(PyTuple_New(Py_ssize_t(count)));
    for (size_t k = 0; k < count; ++k) PyTuple_SET_ITEM(flags.get(), k, PyBool_FromLong(needed[k]));
    THPObjectPtr capsule(capsule_of(gradient));
    THPObjectPtr found(PyObject_CallFunctionObjArgs(gradient->in_python.get(),
                                                    gradient->differentiable.get(), capsule.get(),
                                                    saved_tensors.get(), flags.get(),
                                                    cotangents.get(), nullptr));
    if (!found) throw_python_error();
    variable_list gradients(count);
    for (size_t k = 0; k < count; ++k) {
      PyObject* one = PyTuple_GET_ITEM(found.get(), k);
      if (one != Py_None) gradients[k] = THPVariable_Unpack(one);
    }
    return gradients;
  }

  [[noreturn]] static void throw_python_error() {
    python_error error;
    error.persist();
    throw std::move(error);
  }

 public:
  static constexpr const char* CAPSULE = "assocscan gradient";
  static PyObject* capsule_of(const std::shared_ptr<Gradient>& gradient) {
    return PyCapsule_New(new std::shared_ptr<Gradient>(gradient), CAPSULE, [](PyObject* capsule) {
      delete static_cast<std::shared_ptr<Gradient>*>(PyCapsule_GetPointer(capsule, CAPSULE));
    });
  }
};

// Connects the results of a forward program to the autograd graph.
inline void connect(const std::shared_ptr<Gradient>& gradient, c10::ArrayRef<Tensor> tensors,
                    c10::ArrayRef<Tensor> results) {
#ifdef SHARED_NODES
  auto node = std::shared_ptr<ScanBackward>(new ScanBackward(), torch::autograd::deleteNode);
#else
  auto node = c10::make_intrusive<ScanBackward>();
#endif
  node->gradient = gradient;
  torch::autograd::edge_list edges;
  for (const Tensor& t : tensors) edges.push_back(torch::autograd::impl::gradient_edge(t));
  node->set_next_edges(std::move(edges));
  for (size_t k = 0; k < results.size(); ++k) {
    if (gradient->is_integer[k])
      node->add_input_metadata(torch::autograd::Node::undefined_input());
    else
      torch::autograd::set_history(results[k], node);
  }
  node->saved.reserve(tensors.size() + gradient->saved_results.size());
  for (size_t k = 0; k < tensors.size(); ++k)
    node->saved.emplace_back(gradient->reads[k] ? tensors[k] : Tensor(), false);
  for (const Slot k : gradient->saved_results) node->saved.emplace_back(results[k], true);
#if __has_include(<torch/csrc/autograd/node_creation_hook.h>)
  torch::autograd::fire_node_creation_hooks(node);
#endif
}

}  // namespace assocscan
