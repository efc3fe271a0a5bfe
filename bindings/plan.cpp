#include "bindings/plan.h"

namespace nb = nanobind;

namespace flashmoe {

Fields describe(const flashmoe_launch& launch) {
  Fields fields;
  fields["kernel"] = nb::str(launch.kernel);
  fields["device"] = nb::make_tuple(launch.device.device_type, launch.device.device_id);
  fields["grid"] = nb::make_tuple(launch.grid[0], launch.grid[1], launch.grid[2]);
  fields["block"] = nb::make_tuple(launch.block[0], launch.block[1], launch.block[2]);
  fields["cluster"] = nb::int_(launch.cluster);
  fields["stages"] = nb::int_(launch.stages);
  fields["shared_bytes"] = nb::int_(launch.shared_bytes);
  fields["tile_m"] = nb::int_(launch.tile_m);
  fields["tile_n"] = nb::int_(launch.tile_n);
  fields["dim"] = nb::int_(launch.dim);
  fields["dim_v"] = nb::int_(launch.dim_v);
  fields["registers"] = nb::int_(launch.registers);
  fields["local_bytes"] = nb::int_(launch.local_bytes);
  fields["binary_arch"] = nb::int_(launch.binary_arch);
  fields["repeats"] = nb::int_(launch.repeats > 1 ? launch.repeats : 1);
  return fields;
}

Fields describe(const flashmoe_plan& plan) {
  nb::list launches;
  for (int32_t i = 0; i < plan.launch_count; ++i) launches.append(describe(plan.launches[i]));
  Fields fields;
  fields["operation"] = nb::str(plan.operation);
  fields["family"] = nb::str(plan.family);
  fields["isa"] = nb::str(plan.isa);
  fields["microseconds"] = nb::float_(plan.microseconds);
  fields["flops"] = nb::float_(plan.flops);
  fields["bytes"] = nb::float_(plan.bytes);
  fields["workspace_bytes"] = nb::int_(plan.workspace_bytes);
  fields["launches"] = launches;
  fields["rejected"] = nb::str(plan.rejected);
  return fields;
}

}  // namespace flashmoe
