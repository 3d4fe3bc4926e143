// Attention's allocations with a node of autograd's graph, and no launches: the least time of an attention whose node is
// in C++.

#include "../../../cudnn_sdpa/engine/native/gradient.h"

#include <ATen/core/LegacyTypeDispatch.h>

namespace {

using namespace cudnn_sdpa;

struct EmptyNode : public Node {
  std::string name() const override {
    return "EmptyNode";
  }

  void release_variables() override {
    for (auto& variable : saved) variable.reset_data();
  }

  variable_list apply(variable_list&& grads) override {
    const auto self = Nodes<NodePointer>::of(static_cast<Node*>(this));
    variable_list tensors;
    for (const auto& variable : saved) tensors.push_back(variable.unpack(self));
    variable_list found;
    for (size_t place = 0; place < 3; ++place) found.push_back(at::empty_like(tensors[place]));
    return found;
  }

  std::vector<SavedVariable> saved;
};

at::Tensor attend(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v) {
  at::Tensor out, lse;
  {
    const at::AutoDispatchBelowADInplaceOrView below;
    out = at::empty_like(q);
    lse = at::empty(q.sizes().slice(0, 3), q.options().dtype(at::kFloat));
  }
  auto node = Nodes<NodePointer>::make<EmptyNode>();
  node->set_next_edges(torch::autograd::collect_next_edges(q, k, v));
  torch::autograd::set_history(out, node);
  node->saved.reserve(5);
  for (const auto& tensor : {q, k, v}) node->saved.emplace_back(tensor, false);
  node->saved.emplace_back(out, true);
  node->saved.emplace_back(lse, false);
  return out;
}

}  // namespace

PYBIND11_MODULE(_empty_node, module) {
  module.def("attend", [](py::handle q, py::handle k, py::handle v) {
    const auto out = attend(THPVariable_Unpack(q.ptr()), THPVariable_Unpack(k.ptr()), THPVariable_Unpack(v.ptr()));
    return py::reinterpret_steal<py::object>(THPVariable_Wrap(out));
  });
}
