"""Tests of the code for CUDA tensors: each branch of the product, and its test.

Tests in test_branches.py and test_trainer.py take GPU 0 where there is one, else `tests.support.fake_gpu`.
Those in test_cuda_job.py are skipped without a GPU. "real" marks them.

| branch | test |
|---|---|
| policy/devices.py `choose_gpu` | unit/policy/test_devices.py |
| state/state_dict.py `find_gpus`, `find_gpu_uuid` | `test_gpu_of_model_is_found_and_given_to_ddp` |
| ranks/collectives.py `_create_default_group` | unit/ranks; real: `test_launcher_shows_rank_its_own_gpu` |
| ranks/collectives.py `broadcast_tensors` | `test_buffers_on_gpu_travel_over_the_default_group` |
| | real: `test_launcher_shows_rank_its_own_gpu`, over NCCL |
| training/rank0_buffers.py, a buffer's device | `test_buffers_on_gpu_travel_over_the_default_group` |
| training/run.py `ddp`, device_ids | `test_gpu_of_model_is_found_and_given_to_ddp`; real: every job |
| data/rng.py `seed_all_generators` | `test_generators_of_gpus_are_seeded` |
| capture/copy_barrier.py, graph capture | `test_optimizer_step_in_graph_is_refused` |
| capture/source_digests.py | `test_change_during_copy_discards_snapshot` |
| | real: `test_state_that_a_graph_changes_is_copied` |
| capture/copy_barrier.py, a skipped step | `test_step_that_a_scaler_skips_keeps_snapshot` |
| capture/copy_engine.py, streams and events | `test_snapshot_equals_state_at_step_boundary` |
| capture/copy_engine.py, pinned slots | the same; unit/capture/test_snapshotter.py |
| | `test_slot_that_cannot_be_pinned_is_copied_slowly` |
| capture/snapshotter.py, clones; tensors on both devices | `test_snapshot_equals_state_at_step_boundary` |
| capture/snapshot_plan.py, devices and shards | the same; real: jobs with two workers on a node |
| capture/direct_write.py | `test_live_state_is_written_in_pieces` |
| state/state_dict.py, digests | `test_resume_loads_state_onto_gpu` |
| state/load_objects.py, an optimizer's dtypes | `test_resume_loads_state_onto_gpu` |
| state/bucket_order.py, zeros on the device | real: a killed job of several ranks |
| restore/coordinator.py, rank 0's first state | real: every job of several ranks |
| integrations/transformers.py, fork_rng | test_trainer.py |
| agent/workers/forkserver.py, CUDA in a preload | integration/test_forkserver.py, with a stub |
| mechanisms/slow_ranks/own_time.py `CudaClock` | unit/mechanisms/slow_ranks/test_own_time.py, with a stub |
| mechanisms/compute_check | real: `test_checks_of_gradients_leave_no_trace_on_gpu`; sums of rows: unit |
| gpus.py, mechanisms/gpu_health | unit/test_gpus.py and unit/mechanisms/gpu_health, with a fake NVML; |
| | real: test_nvml.py |
| commands/doctor.py, number of GPUs | unit/commands/test_doctor.py, with a stub |
"""
