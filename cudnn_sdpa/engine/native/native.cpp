// The native way of calls: the module that Python loads.
//
// It recognizes a call, allocates its results, launches its plan and is its node in autograd's graph.
// It knows no operation, no option and no cuDNN: Python gives it finished recipes, and it repeats them. What it does not
// know goes back to Python. Names are those of engine/launch.py, whose bound plans recipes are made of.
#include "calls.h"

namespace cudnn_sdpa {
namespace {

Layout layout_of(const py::handle& given) {
  auto [sizes, strides, dtype] = py::cast<std::tuple<std::vector<int64_t>, std::vector<int64_t>, py::object>>(given);
  if (!THPDtype_Check(dtype.ptr())) throw std::invalid_argument("a layout without a dtype");
  const auto scalar_type = reinterpret_cast<THPDtype*>(dtype.ptr())->scalar_type;
  return {std::move(sizes), std::move(strides), scalar_type, std::move(dtype)};
}

std::vector<Layout> layouts_of(const py::sequence& given) {
  std::vector<Layout> layouts;
  for (const auto& layout : given) layouts.push_back(layout_of(layout));
  return layouts;
}

std::vector<Pointer> pointers_of(const py::sequence& given) {
  std::vector<Pointer> pointers;
  for (const auto& pointer : given) {
    const auto [place, slot, offset] = py::cast<std::tuple<size_t, size_t, int64_t>>(pointer);
    pointers.push_back({place, slot, offset});
  }
  return pointers;
}

Kernel kernel_of(const py::handle& given) {
  return {
      .launch_ex = reinterpret_cast<decltype(Kernel::launch_ex)>(py::cast<uint64_t>(given.attr("launch_ex"))),
      .is_capturing = reinterpret_cast<decltype(Kernel::is_capturing)>(py::cast<uint64_t>(given.attr("is_capturing"))),
      .function = reinterpret_cast<void*>(py::cast<uint64_t>(given.attr("function"))),
      .blocks = py::cast<unsigned>(given.attr("blocks")),
      .threads = py::cast<unsigned>(given.attr("threads")),
      .shared = py::cast<unsigned>(given.attr("shared")),
      .overlaps = py::cast<bool>(given.attr("overlaps")),
      .python = given.attr("launch")};
}

std::vector<uint64_t> fields_of(const py::handle& given) {
  auto fields = py::cast<std::vector<uint64_t>>(given);
  if (fields.size() > most_fields) throw std::invalid_argument("a kernel of too many fields");
  return fields;
}

Program program_of(const py::dict& given) {
  Program program;
  for (const auto& kernel : py::sequence(given["program"])) program.kernels.push_back(kernel_of(kernel));
  program.fields = fields_of(given["fields"]);
  program.places = py::cast<decltype(program.places)>(given["copied"]);
  program.scratch = py::cast<decltype(program.scratch)>(given["scratch_places"]);
  return program;
}

Functions functions_of(const py::dict& given) {
  Functions functions;
  for (const auto& call : py::sequence(given["functions"])) {
    const auto [address, first, count] = py::cast<std::tuple<uint64_t, size_t, int32_t>>(call);
    functions.calls.push_back({reinterpret_cast<Functions::Function>(address), first, count});
  }
  functions.set_stream = reinterpret_cast<Functions::SetStream>(py::cast<uint64_t>(given["set_stream"]));
  functions.device = py::cast<int32_t>(given["device"]);
  functions.words = py::cast<std::vector<uint64_t>>(given["words"]);
  functions.pointers = pointers_of(given["written"]);
  functions.scratch = py::cast<decltype(functions.scratch)>(given["in_workspace"]);
  functions.links = py::cast<decltype(functions.links)>(given["links"]);
  functions.numbers = py::cast<decltype(functions.numbers)>(given["host_numbers"]);
  functions.zeroed = py::cast<decltype(functions.zeroed)>(given["zeroed"]);
  functions.refuse = given["refuse"];
  return functions;
}

py::object get(const py::dict& given, const char* name) {
  return given.contains(name) ? py::reinterpret_borrow<py::object>(given[name]) : py::object();
}

Plan plan_of(const py::dict& given) {
  Plan plan;
  plan.python = given["plan"];
  plan.launch_in_python = given["launch"];
  const py::object uses = given["uses"], last_use = given["last_use"];
  plan.use_arrays = py::make_tuple(uses, last_use);
  plan.uses = words_in(uses, 1), plan.last_use = words_in(last_use, 1);
  if (given.contains("workspace")) plan.workspace = layout_of(given["workspace"]);
  if (given.contains("program")) plan.program = program_of(given);
  if (given.contains("functions")) plan.functions = functions_of(given);
  if (given.contains("recorded")) {
    plan.recorded = py::cast<std::shared_ptr<Recorded>>(given["recorded"]);
    plan.watch = given["watch"], plan.zeros = py::cast<uint64_t>(given["zeros"]);
  }
  plan.execute = get(given, "execute");
  if (!plan.execute) return plan;
  plan.slots = given["slots"], plan.capturing = given["capturing"];
  plan.keep = given["keep"], plan.refused = given["refused"];
  plan.device = given["device"], plan.count = given["count"], plan.no_overrides = py::int_(-1);
  plan.of_bound = py::str("bound"), plan.of_cleared = py::str("cleared"), plan.of_raw = py::str("raw");
  plan.of_scratch = py::str("scratch"), plan.of_taken = py::str("taken");
  plan.bind = py::str("bind"), plan.make_filled = py::str("make_filled");
  plan.device_number = py::cast<int64_t>(plan.device), plan.scratch = py::cast<int64_t>(given["scratch"]);
  return plan;
}

std::shared_ptr<Recipe> recipe_of(const py::dict& given) {
  auto recipe = std::make_shared<Recipe>();
  recipe->operands = py::cast<size_t>(given["operands"]);
  recipe->aligned = pointers_of(given["aligned"]);
  recipe->results = layouts_of(given["results"]);
  recipe->buffers = layouts_of(given["buffers"]);
  recipe->offsets = py::cast<std::vector<uint64_t>>(given["offsets"]);
  recipe->may_take = py::cast<uint64_t>(given["prologue_scratch"]) > 0;
  if (recipe->offsets.size() != recipe->buffers.size()) throw std::invalid_argument("a buffer without an offset");
  for (const auto& own : py::sequence(given["kernels"])) {
    recipe->kernels.push_back(
        {kernel_of(own.attr("kernel")), fields_of(own.attr("fields")), pointers_of(own.attr("pointers"))});
  }
  recipe->pointers = py::cast<std::vector<uint64_t>>(given["pointers"]);
  recipe->places = pointers_of(given["places"]);
  recipe->number_places = py::cast<std::vector<size_t>>(given["number_places"]);
  recipe->numbers = py::cast<std::vector<float>>(given["numbers"]);
  recipe->arrays = given["arrays"];
  recipe->plan = plan_of(given);
  recipe->allocate = get(given, "allocate");
  recipe->pytorchs = {
      .stream = given["stream"],
      .device = get(given, "current_device"),
      .number = given["device"],
      .is_pytorchs_stream = py::cast<bool>(given["is_pytorchs_stream"]),
      .has_one_device = py::cast<bool>(given["has_one_device"])};
  if (recipe->operands + recipe->results.size() + recipe->buffers.size() > most_operands) {
    throw std::invalid_argument("a recipe of too many operands");
  }
  return recipe;
}

std::shared_ptr<Differentiation> differentiation_of(
    std::string name, py::object gradients, py::object options, py::object setting, py::object in_force,
    std::vector<int> differentiable, std::vector<int> saved, size_t first_result, size_t last_result, size_t returned) {
  auto found = std::make_shared<Differentiation>();
  found->name = std::move(name);
  found->gradients = std::move(gradients);
  found->options = std::move(options);
  if (!setting.is_none()) {
    if (!PyContextVar_CheckExact(setting.ptr())) throw std::invalid_argument("a setting that is no context variable");
    found->setting = std::move(setting), found->in_force = std::move(in_force);
  }
  found->differentiable = std::move(differentiable);
  found->saved = std::move(saved);
  found->first_result = first_result;
  found->last_result = last_result;
  found->returned = returned;
  return found;
}

// Takes the driver's functions from a dictionary of their addresses, which has all.
void set_driver(const py::dict& addresses) {
#define CUDNN_SDPA_TAKE(name, parameters) \
  cuda.name = reinterpret_cast<decltype(cuda.name)>(py::cast<uintptr_t>(addresses[#name]));
  CUDNN_SDPA_DRIVER_FUNCTIONS(CUDNN_SDPA_TAKE)
#undef CUDNN_SDPA_TAKE
}

std::vector<std::string> driver_functions() {
#define CUDNN_SDPA_NAME(name, parameters) #name,
  return {CUDNN_SDPA_DRIVER_FUNCTIONS(CUDNN_SDPA_NAME)};
#undef CUDNN_SDPA_NAME
}

// Executes functions as the frontend executes a plan, with a stream in place of cuDNN's handle.
py::cpp_function executor_of(const py::dict& given) {
  return [functions = functions_of(given)](uint64_t operands, size_t, uint64_t workspace, uint64_t stream, int) {
    functions.execute(reinterpret_cast<const uint64_t*>(operands), workspace, {stream});
  };
}

const uint64_t* operands_of(const Recorded& recorded, const std::vector<uint64_t>& pointers) {
  if (pointers.size() != recorded.operands()) throw std::invalid_argument("a launch of other operands");
  return pointers.data();
}

}  // namespace
}  // namespace cudnn_sdpa

PYBIND11_MODULE(_native, module) {
  using namespace cudnn_sdpa;
  const auto type = checked(PyType_FromSpec(&calls_spec));
  module.add_object("Calls", type);
  module.def("is_observed", &is_observed);
  module.def("set_missed", [](py::object object) {
    if (missed == nullptr) missed = object.release().ptr();
  });
  forward_ad = PyModule_GetDict(py::module_::import("torch.autograd.forward_ad").release().ptr());
  current_level = PyUnicode_InternFromString("_current_level");
  py::class_<Recipe, std::shared_ptr<Recipe>>(module, "Recipe").def(py::init(&recipe_of));
  py::class_<Differentiation, std::shared_ptr<Differentiation>>(module, "Differentiation")
      .def(
          py::init(&differentiation_of), py::kw_only(), py::arg("name"), py::arg("gradients"), py::arg("options"),
          py::arg("setting"), py::arg("in_force"), py::arg("differentiable"), py::arg("saved"), py::arg("first_result"),
          py::arg("last_result"), py::arg("returned"));
  module.def("driver_functions", &driver_functions);
  module.def("set_driver", &set_driver);
  module.def("end_recordings", [] { Asking::is_over = true; });
  module.def("asking", [] { return Asking::count; });
  py::class_<Recorded, std::shared_ptr<Recorded>>(module, "Recorded")
      .def(py::init())
      .def_readwrite("is_watched", &Recorded::is_watched)
      .def_readwrite("is_serving", &Recorded::is_serving)
      .def_readwrite("calls_before", &Recorded::calls_before)
      .def_readonly("error", &Recorded::error)
      .def_property_readonly("names", &Recorded::names)
      .def_readwrite("takes_zeros", &Recorded::takes_zeros)
      .def_property_readonly("sets_operands", &Recorded::sets_operands)
      .def_property_readonly("zeros", &Recorded::zeros)
      .def_property_readonly("counters", &Recorded::counters)
      .def("take_context", &Recorded::take_context)
      .def(
          "record", &Recorded::record, py::kw_only(), py::arg("stream"), py::arg("handle"), py::arg("execute"),
          py::arg("sets"), py::arg("noise"), py::arg("moving"), py::arg("scalars"), py::arg("workspace"))
      .def_static("executor_of_functions", &executor_of)
      .def("serves", [](const Recorded& self, const std::vector<uint64_t>& pointers) {
        return self.serves(operands_of(self, pointers));
      })
      .def(
          "launch",
          [](Recorded& self, const std::vector<uint64_t>& pointers, uint64_t workspace, uint64_t stream, uint64_t zeros) {
            return self.launch(operands_of(self, pointers), workspace, stream, zeros);
          },
          py::arg("pointers"), py::arg("workspace"), py::arg("stream"), py::arg("zeros") = 0);
}
