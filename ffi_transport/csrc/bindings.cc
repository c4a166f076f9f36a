// The Python module `_native`. Thin: it converts arguments, releases the GIL around everything that
// may wait, and turns a Status into one of ffi_transport.errors. engine.py gives it its types.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <array>
#include <thread>

#include "baseline.h"
#include "engine.h"
#include "trigger_ffi.h"

namespace nb = nanobind;

namespace ffi_transport {
namespace {

using Pages = nb::ndarray<const uint32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
// (source_page_bytes, source_offset, destination_page_bytes, destination_offset, length)
using UnitTuple = std::tuple<uint64_t, uint64_t, uint64_t, uint64_t, uint64_t>;

// Thrown only in the Python thread that called, never across threads.
struct StatusError {
  Status status;
};

void check(const Status& status) {
  if (!status.ok()) throw StatusError{status};
}

template <class T>
T check(Result<T> result) {
  check(result.status());
  return result.take();
}

// Text that may come from a peer: whatever its bytes are, it becomes a str.
nb::str to_text(const std::string& text) {
  return nb::steal<nb::str>(
      PyUnicode_DecodeUTF8(text.data(), static_cast<Py_ssize_t>(text.size()), "replace"));
}

void raise_python(const Status& status) {
  const Status::Detail detail = status.detail();
  nb::object errors = nb::module_::import_("ffi_transport.errors");
  nb::object error =
      errors.attr("from_native")(static_cast<int>(status.code()), to_text(detail.text), detail.peer,
                                 detail.id, detail.elapsed_s, to_text(detail.missing));
  PyErr_SetObject(reinterpret_cast<PyObject*>(Py_TYPE(error.ptr())), error.ptr());
}

// Calls without the GIL. Native threads never need it, so this cannot deadlock with them.
template <class Function>
auto unlocked(Function&& function) {
  nb::gil_scoped_release release;
  return function();
}

// For tests: says something to an engine's control endpoint without being an engine.
Status send_raw_packet(const std::string& address, const std::string& bytes) {
  const auto fabric = make_loopback();
  auto name = fabric->parse_address(address);
  if (!name.ok()) return name.status();
  auto domain = fabric->open_domain("");
  auto endpoint = (*domain)->open_endpoint(0);
  OpContext context;
  Status status =
      (*endpoint)->send(*(*endpoint)->insert(*name), bytes.data(), bytes.size(), nullptr, &context);
  if (!status.ok()) return status;
  std::array<Completion, 1> done;
  const auto end = Clock::now() + std::chrono::seconds(10);
  while (Clock::now() < end) {
    if ((*endpoint)->poll(done) == 1) return {};
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  return Status(Code::kTimeout, "nobody took the packet");
}

std::string to_string(const nb::bytes& bytes) { return {bytes.c_str(), bytes.size()}; }
nb::bytes to_bytes(const std::string& text) { return nb::bytes(text.data(), text.size()); }

RemoteRegion to_remote(const nb::bytes& descriptor) {
  return check(RemoteRegion::decode({descriptor.c_str(), descriptor.size()}));
}

PageLists to_pages(const Pages& source, const Pages& destination) {
  PageLists lists;
  lists.source.assign(source.data(), source.data() + source.size());
  lists.destination.assign(destination.data(), destination.data() + destination.size());
  return lists;
}

PageUnit to_unit(const UnitTuple& unit) {
  return {std::get<0>(unit), std::get<1>(unit), std::get<2>(unit), std::get<3>(unit),
          std::get<4>(unit)};
}

// Owned by its Python object from here on.
Engine* make_engine(const nb::dict& config, std::optional<nb::bytes> hello) {
  EngineOptions options;
  options.provider = nb::cast<std::string>(config["provider"]);
  options.bind = nb::cast<std::string>(config["bind"]);
  options.control_port = nb::cast<uint16_t>(config["control_port"]);
  options.domains = nb::cast<std::vector<std::string>>(config["domains"]);
  options.domain_cpus = nb::cast<std::vector<std::vector<int>>>(config["domain_cpus"]);
  options.spin_us = nb::cast<int>(config["spin_us"]);
  options.bytes_in_flight = nb::cast<uint64_t>(config["bytes_in_flight"]);
  options.posts_in_flight = nb::cast<uint32_t>(config["posts_in_flight"]);
  options.heartbeat_ms = nb::cast<int>(config["heartbeat_ms"]);
  options.peer_timeout_ms = nb::cast<int>(config["peer_timeout_ms"]);
  options.slot_bits = nb::cast<uint32_t>(config["slot_bits"]);
  options.libfabric_path = nb::cast<std::string>(config["libfabric_path"]);
  const auto device_memory = nb::cast<std::string>(config["device_memory"]);
  options.device_memory = device_memory == "direct"   ? DeviceMemory::kDirect
                          : device_memory == "staged" ? DeviceMemory::kStaged
                                                      : DeviceMemory::kAuto;
  options.staging_bytes = nb::cast<uint64_t>(config["staging_bytes"]);
  options.trace = nb::cast<bool>(config["trace"]);
  std::optional<std::string> native_hello;
  if (hello) native_hello = to_string(*hello);
  auto engine = unlocked([&] { return Engine::create(options, std::move(native_hello)); });
  return check(std::move(engine)).release();
}

nb::list poll(Engine& engine, double timeout_s) {
  const std::vector<Event> events = unlocked([&] { return engine.poll(timeout_s); });
  nb::list out;
  for (const Event& event : events) {
    out.append(nb::make_tuple(static_cast<int>(event.kind), event.peer, event.id, event.first,
                              event.second, event.bytes, event.outcome, event.elapsed_s,
                              to_text(event.text), to_bytes(event.payload)));
  }
  return out;
}

// One element of writes: (transfer, ordinal, first_layer, source_pages, destination_pages, unit,
// [descriptor of each layer]).
Engine::PlanRequest to_request(const nb::tuple& write) {
  Engine::PlanRequest request;
  request.transfer = nb::cast<int64_t>(write[0]);
  request.ordinal = nb::cast<int>(write[1]);
  request.first_layer = nb::cast<int>(write[2]);
  request.pages = to_pages(nb::cast<Pages>(write[3]), nb::cast<Pages>(write[4]));
  request.unit = to_unit(nb::cast<UnitTuple>(write[5]));
  for (nb::handle remote : nb::cast<nb::list>(write[6])) {
    request.remotes.push_back(to_remote(nb::cast<nb::bytes>(remote)));
  }
  return request;
}

// ([region of each], pages, page_bytes).
Engine::LandingRequest to_landing(const nb::tuple& landing) {
  const Pages pages = nb::cast<Pages>(landing[1]);
  return {nb::cast<std::vector<int64_t>>(landing[0]),
          {pages.data(), pages.data() + pages.size()},
          nb::cast<uint64_t>(landing[2])};
}

void bind_engine(nb::module_& module) {
  nb::class_<Engine>(module, "Engine")
      .def_prop_ro("provider", &Engine::provider)
      .def_prop_ro("control_address", &Engine::control_address)
      .def_prop_ro("epoch", &Engine::epoch)
      .def_prop_ro("index", &Engine::index)
      .def_prop_ro("event_fd", &Engine::event_fd)
      .def("close", [](Engine& self) { return unlocked([&] { return self.close(); }); })
      .def(
          "register_memory",
          [](Engine& self, uint64_t address, uint64_t length,
             std::optional<std::vector<int64_t>> domains, std::optional<int> device) {
            const auto region = check(unlocked(
                [&] { return self.register_memory(address, length, std::move(domains), device); }));
            return nb::make_tuple(region->id, to_bytes(check(self.descriptor(region->id))));
          },
          nb::arg("address"), nb::arg("length"), nb::arg("domains").none(),
          nb::arg("device").none())
      .def("memory_mode",
           [](Engine& self, int64_t region) {
             const auto [mode, why_staged] = check(self.memory_mode(region));
             return nb::make_tuple(static_cast<int>(mode), to_text(why_staged));
           })
      .def("deregister",
           [](Engine& self, int64_t region) {
             check(unlocked([&] { return self.deregister(region); }));
           })
      .def("connect",
           [](Engine& self, const std::string& address, double timeout_s) {
             return check(unlocked([&] { return self.connect(address, timeout_s); }));
           })
      .def(
          "peer_hello",
          [](Engine& self, int64_t peer) { return to_bytes(check(self.control().hello_of(peer))); })
      .def("set_hello",
           [](Engine& self, const nb::bytes& hello) {
             std::string native = to_string(hello);
             check(self.check_open());
             unlocked([&] { self.control().set_hello(std::move(native)); });
           })
      .def("send",
           [](Engine& self, int64_t peer, const nb::bytes& payload) {
             check(self.control().send(peer, to_string(payload)));
           })
      .def("fence",
           [](Engine& self, int64_t peer) {
             check(unlocked([&] { return self.control().fence(peer); }));
           })
      .def("disconnect",
           [](Engine& self, int64_t peer) {
             check(unlocked([&] { return self.control().disconnect(peer); }));
           })
      .def("arm",
           [](Engine& self, int64_t slot, int64_t expected, bool adopt_early,
              const nb::list& landings) {
             std::vector<Engine::LandingRequest> requests;
             for (nb::handle landing : landings) {
               requests.push_back(to_landing(nb::cast<nb::tuple>(landing)));
             }
             check(unlocked([&] { return self.arm(slot, expected, adopt_early, requests); }));
           })
      .def("disarm",
           [](Engine& self, int64_t slot) { check(unlocked([&] { return self.disarm(slot); })); })
      .def("seen", [](Engine& self, int64_t slot) { return check(self.counters().seen(slot)); })
      .def("open_transfer", [](Engine& self, int64_t peer,
                               int64_t slot) { return check(self.open_transfer(peer, slot)); })
      .def("write",
           [](Engine& self, int64_t transfer, int64_t region, uint64_t offset,
              const nb::bytes& remote, uint64_t remote_offset, uint64_t length, uint64_t units) {
             check(self.write(transfer, region, offset, to_remote(remote), remote_offset, length,
                              units));
           })
      .def("write_paged",
           [](Engine& self, int64_t transfer, int64_t region, const nb::bytes& remote,
              const Pages& source, const Pages& destination, const UnitTuple& unit) {
             const RemoteRegion target = to_remote(remote);
             PageLists pages = to_pages(source, destination);
             check(unlocked([&] {
               return self.write_paged(transfer, region, target, std::move(pages), to_unit(unit));
             }));
           })
      .def("seal", [](Engine& self, int64_t transfer) { check(self.seal(transfer)); })
      .def("cancel_transfer", [](Engine& self, int64_t transfer) { check(self.cancel(transfer)); })
      .def("set_source_region",
           [](Engine& self, int ordinal, int layer, int64_t region) {
             check(self.set_source_region(ordinal, layer, region));
           })
      .def("add_plan",
           [](Engine& self, int64_t step, std::vector<int> ordinals, int layers,
              const nb::list& writes, double timeout_s) {
             std::vector<Engine::PlanRequest> requests;
             for (nb::handle write : writes) {
               requests.push_back(to_request(nb::cast<nb::tuple>(write)));
             }
             check(unlocked([&] {
               return self.add_plan(step, std::move(ordinals), layers, std::move(requests),
                                    timeout_s);
             }));
           })
      .def("open_slots",
           [](Engine& self, const std::vector<int>& ordinals, int layers, bool device) {
             check(unlocked([&] { return self.open_slots(ordinals, layers, device); }));
           })
      .def("drop_plan", [](Engine& self,
                           int64_t step) { check(unlocked([&] { return self.drop_plan(step); })); })
      .def("poll", &poll)
      .def("counters",
           [](Engine& self) {
             nb::dict out;
             for (const auto& [name, value] : self.stats()) out[name.c_str()] = value;
             return out;
           })
      .def("domain_counters",
           [](Engine& self) {
             nb::list out;
             for (const Engine::DomainCounters& domain : self.domain_counters()) {
               nb::dict one;
               one["name"] = to_text(domain.name);
               one["cpus"] = domain.cpus;
               one["units_posted"] = domain.units_posted;
               one["bytes_posted"] = domain.bytes_posted;
               one["units_completed"] = domain.units_completed;
               one["bytes_completed"] = domain.bytes_completed;
               one["units_counted"] = domain.units_counted;
               out.append(one);
             }
             return out;
           })
      .def("trace", [](Engine& self) {
        const std::vector<TraceRecord> records = unlocked([&] { return self.trace(); });
        return nb::bytes(reinterpret_cast<const char*>(records.data()),
                         records.size() * sizeof(TraceRecord));
      });
}

void bind_baselines(nb::module_& module) {
  module.def("stream_send", [](int socket, uint64_t memory, const Pages& source,
                               const Pages& destination, size_t page_bytes) {
    const PageLists pages = to_pages(source, destination);
    check(unlocked([&] {
      return stream_send(socket, reinterpret_cast<const char*>(memory), pages, page_bytes);
    }));
  });
  module.def("stream_receive", [](int socket, uint64_t memory, uint64_t memory_pages,
                                  uint64_t count, size_t page_bytes) {
    check(unlocked([&] {
      return stream_receive(socket, reinterpret_cast<char*>(memory), memory_pages, count,
                            page_bytes);
    }));
  });
  module.def("copy_pages", [](uint64_t source, uint64_t destination, const Pages& from,
                              const Pages& to, size_t page_bytes) {
    const PageLists pages = to_pages(from, to);
    unlocked([&] {
      copy_pages(reinterpret_cast<const char*>(source), reinterpret_cast<char*>(destination), pages,
                 page_bytes);
    });
  });
}

}  // namespace
}  // namespace ffi_transport

NB_MODULE(_native, module) {
  using namespace ffi_transport;  // NOLINT: the module's own code
  nb::register_exception_translator([](const std::exception_ptr& pointer, void*) {
    try {
      std::rethrow_exception(pointer);
    } catch (const StatusError& error) {
      raise_python(error.status);
    }
  });
  bind_engine(module);
  bind_baselines(module);
  module.def("make_engine", &make_engine, nb::rv_policy::take_ownership, nb::arg("config"),
             nb::arg("hello").none());
  module.def("trigger_handler",
             [] { return nb::capsule(trigger_handler(), "xla._CUSTOM_CALL_TARGET"); });
  module.def("trigger_handler_cuda",
             [] { return nb::capsule(trigger_handler_cuda(), "xla._CUSTOM_CALL_TARGET"); });
  module.def("send_raw_packet", [](const std::string& address, const nb::bytes& packet) {
    const std::string bytes = to_string(packet);
    check(unlocked([&] { return send_raw_packet(address, bytes); }));
  });
  // Fires a trigger as the FFI handler does: for tests of the plan table without a program.
  module.def("fire_trigger", [](int engine, int step, int ordinal, int layer, uint64_t address) {
    TriggerRegistry::fire(engine, step, ordinal, layer, reinterpret_cast<const void*>(address));
  });
}
