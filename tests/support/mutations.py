"""What the package must not lose unnoticed: each guarantee turned off by one change of its source, and who notices.

``tests/soak/test_mutations.py`` turns each of them off in turn, in memory only (``tests/mutated``), and asks that the tests
of its row fail, which pass without it. A row is a name, a module of the package and the fastest tests that notice it; then,
as in a diff, a text that the module has once, and what stands there instead: by default ``pass``, or a condition that never
holds. Lines with ``#`` say what a user would lose.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROWS = r"""
# a resumed run is another one: augmentations
random of python | state.randomness | exact::killed_twice_and_equal[plain]
-generator.setstate((version, tuple(words.tolist()), gauss))
random of numpy | state.randomness | exact::killed_twice_and_equal[plain]
-generator.set_state(mapped(_array, state))
# a resumed run is another one: dropout, the order of samples
random of torch | state.randomness | exact_table::equal_or_warned_of[max-steps]
-generator.set_state(state)
# a resumed run is another one: dropout on a GPU
random of the device | state.fit_state | exact::the_generator_of_the_device_is_set_too
-            restore_random(random, self._trainer.strategy.root_device)
-        return
+            restore_random(random)
+        return
# a program draws other numbers after a run that was complete
random after a complete run | state.fit_state | fit::a_finished_run_is_as_after_training
-            self._go_on_with_random()
-            self._run(compat.PROGRESS, lambda: loops.end_restart(self._trainer))
+            self._go_on()
+            self._run(compat.PROGRESS, lambda: loops.end_restart(self._trainer))
# a resumed run is another one: what a generator of the module draws
random of generators of the module | state.module_state | exact_table::equal_or_warned_of[generator-of-the-module-and-its-sampler]
-        self._put(trainer, generators)
# a resumed run is another one: its epoch begins anew
loader position | state.fit_state | exact_table::equal_or_warned_of[max-steps]
-lambda fit: fit.loaders.positions(at_end=fit.at_end)
+lambda fit: [None for _ in fit.loaders.positions(at_end=fit.at_end)]
# a resumed run is another one: other loaders, at another epoch
loaders around | state.fit_state | exact_table::equal_or_warned_of[reload-every-second-epoch]
-lambda fit: fit.loaders.capture(), _AROUND_LOADERS
+lambda _: None, _AROUND_LOADERS
# a resumed run is another one: its loaders are made with other numbers
loaders asked for as they were | state.fit_state | exact_table::equal_or_warned_of[reload-every-second-epoch]
-    Stage.LOAD: lambda fit, saved: fit.loaders.resume(saved),
-
+
# a resumed run is another one: what loaders draw from of their own
loaders own state | state.fit_state | exact_table::equal_or_warned_of[validation-with-own-generators]
-    Stage.FIRST_BATCH: lambda fit, saved: fit.loaders.go_on(saved),
-
+
# a resumed run is another one: reloads in other epochs
loaders that have ended | state.fit_state | exact_table::equal_or_warned_of[reload-every-second-epoch]
-    Stage.TRAIN_START: lambda fit, saved: fit.loaders.restore(saved),
-
+
# a resumed run is another one: an epoch's metrics are those of its rest
metrics | state.fit_state | exact_table::equal_or_warned_of[logging]
-compat.METRICS, _metrics,
+compat.METRICS, lambda _: {},
# a resumed run is another one: an epoch's means are those of its rest
logged means | state.logged_values | exact_table::equal_or_warned_of[logging]
-        _restore_result(trainer, results, each)
# a resumed run is another one: a scheduler or a callback asks for the last values
logged last | state.logged_values | fit::a_finished_run_is_as_after_training
-        values.of(trainer).update(saved[name])
# means of an epoch are reset in its midst
logged in the epoch | state.fit_state | exact_table::equal_or_warned_of[logging]
-, _to(restore_in_epoch, Stage.FIRST_BATCH)
+
# a resumed run is another one: a step of half its micro-batches
gradients | state.fit_state | exact_table::equal_or_warned_of[manual]
-None, FitState.gradients,
+None, lambda _: {},
# a resumed run is another one: a step of a sharded model with the last of its micro-batches only
unsynced gradients | state.fit_state | sharded_gradients::gradients_that_fsdp_has_not_added_up_come_back[Fsdp]
-            keep_unsynced(self.module, saved["gradients"])
# ranks go on with rank 0's part of what a callback keeps in shards, without a word
shards of callbacks | state.fit_state | sharded_gradients::tensors_in_shards_that_hooks_save_are_named
-        self._findings += what_is_in_shards(checkpoint) if trainer.world_size > 1 else ()
# a resumed run is another one: ranks add gradients up sooner
unsynced modules | state.fit_state | sharded_gradients::gradients_that_fsdp_has_not_added_up_come_back[Fsdp]
-        have_wait(self.module, saved["waits"], saved["copies_wait"])
# a resumed run is another one: a step of copied shards without the first of its micro-batches
sums over copies | state.fit_state | sharded_gradients::gradients_that_fsdp_has_not_added_up_come_back[Copies]
-        keep_partial_sums(self.module, saved["sums"])
# ranks that drew apart are given the random numbers of rank 0
random of DTensors | state.sharded | state_parts::ranks_are_not_given_the_numbers_of_rank_0_again
-        compat.RNG_TRACKER.set(home, compat.MAKE_TRACKER.of(home)(mesh, run_state_sync=False))
# the first step after a resume is rounded in another way, without a word
order of sums | state.replicas | own_parameters::an_order_of_sums_that_cannot_be_had_again_is_named
-    if trainer.world_size > 2 and _orders_anew(trainer.model):
# ranks of DDP drift apart: each steps with its own part of a gradient
used parameters | state.fit_state | sharded_gradients::gradients_that_ddp_has_not_averaged_yet_are
-        mark_used(self._trainer)
# a resumed run is another one: each rank of tensor parallelism takes its part of a gradient for all of it
gradient placements | state.fit_state | sharded_gradients::gradients_that_are_sums_over_ranks_come_back
-        FitState.gradient_placements,
+        lambda _: {},
# a resumed run is another one: buffers outside the state dict
buffers | state.fit_state | exact_table::equal_or_warned_of[buffers-outside-the-state-dict]
-None, _changed_buffers,
+None, lambda _: {},
# a finished run forecasts from other buffers
buffers of a complete run | state.fit_state | fit::a_finished_run_is_as_after_training
-            self._go_on_with_random()
-            self._run(compat.PROGRESS, lambda: loops.end_restart(self._trainer))
+            restore_random(values["random"])
+            self._run(compat.PROGRESS, lambda: loops.end_restart(self._trainer))
# a resumed run is another one: what torch rounds as it loads
precise buffers | state.buffers | exact_table::equal_or_warned_of[double]
-value.to(here.dtype) if value.is_floating_point() else value
+value
# a resumed run is another one: moments in another precision
precise optimizers | state.fit_state | exact_table::equal_or_warned_of[precise-state]
-            self._keep_dtypes(states, buffers.dtypes_of(checkpoint))
# a hook that initialises weights begins the training anew
weights that hooks overwrite | state.buffers | hooks::a_resumed_run_has_the_values_of_its_snapshot[Initialises-net.0.bias, net.0.weight-more0]
-        write(here, value)
# a curriculum begins anew in a resumed run
values of objects in the data | state.own_state | loaders::changed_data_are_kept_or_named[an object-mid-epoch]
-"values": {path: kept for path, _, kept in self._changed() if kept},
+"values": {},
# a resumed run is another one: weights that training tied are two again
what shares memory otherwise | state.module_state | aliases::what_a_module_shares_is_shared_after_a_resume_or_named[weights that training ties]
-        self._apart = sorted({*differing(saved["shared"], shared), *others})
# a resumed run is another one: frozen layers train
requires_grad | state.module_state | exact_table::equal_or_warned_of[backbone-finetuning]
-                parameters[name].requires_grad_(trains)
# a resumed run is another one: counters of the module
attributes of modules | state.module_state | exact_table::equal_or_warned_of[plain-values-and-generators]
-        self._put(trainer, attributes, saved["shared"])
# a resumed run is another one: accumulates as it began
settings of the trainer | state.module_state | exact_table::equal_or_warned_of[accumulation-scheduler]
-                setattr(trainer, name, value)
# a run that a hook made longer ends early
limits of the trainer | state.module_state | exact_table::a_limit_of_a_hook_returns_unless_another_is_given
-        limits = {name: saved["settings"][name] for name in names}
+        limits = dict[str, int]()
# a resumed run is another one: a toggled optimizer trains both
optimizers' toggles | state.fit_state | exact_table::equal_or_warned_of[toggled-over-batches]
-_of(toggled)
+lambda _: {}
# a run that was to stop goes on
should_stop | state.fit_state | exact::a_run_that_has_taken_its_last_step_comes_to_its_end[should_stop-validation]
-lambda fit: fit.trainer.should_stop
+lambda _: False
# a run that was stopped in front of a validation leaves it out
progress before validation | state.fit_state | exact_table::equal_or_warned_of[sanity-check-whole]
-run(compat.PROGRESS, lambda: mark(checkpoint)) if before_validation else None
+None
# a resumed run is another one: schedulers by a metric skip the resumed epoch
restarting | state.fit_state | exact_table::equal_or_warned_of[plateau-of-the-epoch]
-        self._run(compat.PROGRESS, lambda: compat.RESTARTING.set(trainer.fit_loop, False))
# a resumed run is another one: averages and metrics of callbacks
modules of callbacks | state.fit_state | exact_table::equal_or_warned_of[weight-averaging-ema]
-, _to(restore_modules, Stage.TRAIN_START)
+
# a resumed run is another one: tuners look again
what tuners found | state.fit_state | exact_table::equal_or_warned_of[batch-size-finder]
-_of(capture_found)
+lambda _: {}
# a resumed run is another one: callbacks that must know it first
states of callbacks before loading | state.fit_state | best_model::the_best_so_far_comes_back_with_its_path
-        self._run("states of callbacks", lambda: builtin_callbacks.before_loading(trainer, checkpoint))
# rows of the log come twice, or are lost
loggers | state.fit_state | loggers::csv[numbered-epoch-0-1]
-        self._run(compat.LOGGERS, lambda: continued(trainer, shared["loggers"]))
# what is not exact is not named
names of what does not come back | state.fit_state | exact_guards::changes_no_checkpoint_holds_are_named_before_resuming
-run(compat.HOOKED, lambda: self._untracked.names(trainer)) or []
+[]
names of what is lost of modules | state.fit_state | exact_table::equal_or_warned_of[objects-of-the-module]
-"lost": sorted(self.hooked.lost),
+"lost": [],
# a snapshot that was said to be durable is lost with the machine's page cache
fsync of files | store.posix | on_disk::bytes_reach_the_disk_before_names_and_the_manifest_last[1-names0]
-            write_parts(file, parts)
-            os.fsync(file.fileno())
+            write_parts(file, parts)
fsync of directories | store.posix | on_disk::bytes_reach_the_disk_before_names_and_the_manifest_last[1-names0]
-    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
-    try:
-        os.fsync(fd)
+    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
+    try:
+        pass
fsync of a new folder's name | store.posix | on_disk::bytes_reach_the_disk_before_names_and_the_manifest_last[1-names0]
-        sync_directory(folder.parent)
# a claim that fences is lost
fsync of a claim's name | store.store | on_disk::a_claim_is_on_the_disk_whoever_wrote_it & on_disk::a_claim_is_on_the_disk_without_hard_links
-            self._settle(below)  # the attempt that wrote it may have been killed before it did
fsync of a claim without links | store.posix | on_disk::a_claim_is_on_the_disk_without_hard_links
-        file.flush()
-        os.fsync(file.fileno())
+        file.flush()
# a snapshot that was said to be durable is lost with the machine's page cache
fsync of names that are there | store.store | on_disk::the_very_same_once_more_is_on_the_disk
-                self._settle(manifest.path_of(manifest.spans[0]), manifest.manifest_path, manifest.name)
# a manifest stands without its bytes
fsync of a manifest that goes | store.store | on_disk::of_a_deletion_the_manifest_goes_first & on_disk::no_old_manifest_stands_beside_new_bytes
-        self._settle(manifest.manifest_path)
# a snapshot that was said to be durable is lost with the machine's page cache
fsync of a file's name | store.local | on_disk::bytes_reach_the_disk_before_names_and_the_manifest_last[1-names0] & on_disk::a_hosts_file_is_on_the_disk_before_it_is_noted
-                posix.sync_directory(place)
fsync of the snapshot's name | store.store | on_disk::bytes_reach_the_disk_before_names_and_the_manifest_last[1-names0]
-            self._settle(manifest.name)
-            try
+            try
fsync of a folder beneath | store.posix | on_disk::folders_made_for_others_are_on_the_disk
-        sync_directory(_DESCRIPTORS / str(at))
# what cp wrote is lost with the page cache
fsync of what cp writes | cli.snapshots | on_disk::what_cp_writes_is_on_the_disk
-        os.fsync(file.fileno())
fsync of a plain file | sharded.reader | sharded::the_consolidated_file_equals_that_of_a_single_device
-            os.fsync(file.fileno())
# a command drops what is stored nowhere, or ends what is in use, or none of ours
stop keeps slots | client.starting | commands::stop_keeps_what_is_stored_nowhere
-        if discard or not record.left_slots():
+        if True:
stop spares a server in use | cli.stop | commands::stop_spares_a_server_with_a_trainer[more1]
-                if trainers:
+                if False:
stop looks who listens | cli.stop | commands::stop_never_ends_a_process_that_does_not_listen_there
-    is_there = process is not None and _listens(process.pid, address.port)  # it says so, and so does the kernel
+    is_there = process is not None
# half a file is taken for a whole one
rename of a file | store.local | on_disk::bytes_reach_the_disk_before_names_and_the_manifest_last[1-names0] & on_disk::a_hosts_file_is_on_the_disk_before_it_is_noted
-                        os.replace(temporary, place / Path(name).name)
+                        (place / Path(name).name).write_bytes(temporary.read_bytes())
half an object is discarded | store.objects | object_stores::an_error_in_the_middle_leaves_what_was_there[kept-3]
-            file.discard()
+            file.close()
# two trainers of one number both write
exclusive claim | store.posix | directories::of_two_claims_at_once_the_first_holds[links]
-            os.link(temporary, path)
+            os.replace(temporary, path)
exclusive claim without links | store.posix | directories::of_two_claims_at_once_the_first_holds[no-links]
-open(path, "xb")
+open(path, "wb")
# half a file is taken for a whole one
rename of a slot's record | server.area | ring::a_record_is_replaced_not_written_over
-            os.replace(_aside(place), place)
+            place.write_bytes(_aside(place).read_bytes())
# where tmpfs is full, snapshots of a killed server are lost
room for the next record of a slot | server.area | ring::what_is_committed_to_a_full_tmpfs_outlives_a_kill[3]
-            os.replace(record, _aside(record))
+            record.unlink()
# a killed trainer loses rows of its log
rename of a log | state.loggers | loggers::no_row_is_lost_in_a_kill_while_a_column_is_added
-    temporary = file.with_name(f".{file.name}.tmp")
+    temporary = file
# a manifest stands without its bytes
manifest last | store.store | on_disk::bytes_reach_the_disk_before_names_and_the_manifest_last[1-names0] & on_disk::bytes_reach_the_disk_before_names_and_the_manifest_last[2-names1] & stores::bytes_that_no_file_would_keep_are_refused[kept]
-            sealed = self._write_bytes(manifest, data, by)
+            self._write_manifest(manifest, by)
+            sealed = self._write_bytes(manifest, data, by)
# an old manifest stands beside new bytes
old manifest out of the way | store.store | on_disk::no_old_manifest_stands_beside_new_bytes & object_stores::a_file_another_saved_meanwhile_gets_no_wrong_manifest[True]
-            self._write_manifest(replace(manifest, checksums=()), by)
-        elif
+            pass
+        elif
# a manifest stands without its bytes
manifest first in a deletion | store.store | on_disk::of_a_deletion_the_manifest_goes_first & on_disk::of_a_deletion_in_a_bucket_the_manifest_goes_first
-            self._unnote(manifest)  # never at once with the others: not without its bytes
+            self._remove("" if manifest.is_file else manifest.name, [span.name for span in manifest.spans])
+            self._unnote(manifest)
# a rewind said yes to what is deleted the moment after
a rewind during a deletion | store.store | history::a_rewind_during_a_deletion_is_seen
-            if wanted():
+            if False:
# what is left of a removed run fences the next one off
a claim made late | store.store | ownership::a_server_of_a_removed_run_leaves_the_next_one_alone
-    claim_late(store, standing.claim)
+    store.claim(standing.claim)
# the one server with the newest is lost, and the other has given up the one before
whole until something newer is whole | server.slots | groups::what_is_whole_stays_until_something_newer_is_here_too
-        watermark = None if self.is_here and not self.has_newer else self.watermark
+        watermark = self.watermark
# older ones are deleted before the new one is seen whole
seen as it was written before older ones go | store.retention | stores::retention_deletes_nothing_where_the_newest_is_missing[local]
-    if not store.has(current):
# a start resumes from what a rewind has set aside
set aside at a start | run.survey | history::what_is_taken_after_a_rewind_counts_at_once[directory]
-        found = [item for item in self._held() if not self.is_aside(item[0].order)]
+        found = self._held()
# what a trainer at work has just stored is removed
a trainer at work | cli.history | history::nothing_is_changed_while_a_trainer_may_be_at_work[directory-rm]
-        run.check_idle()
-        _forget
+        _forget
# a run is removed while a trainer begins
who begins meanwhile | cli.history | history::who_begins_meanwhile_is_not_disturbed[directory-rm]
-        if self.store.claimed() > self.attempt:
# a late upload deletes what a rewind goes back to
set aside | store.retention | retention::what_is_set_aside_stays_until_something_newer_is_stored
-    if held.sets_aside(current.order):
# older ones are deleted before the new one is listed
listed before older ones go | store.retention | stores::retention_deletes_nothing_where_the_newest_is_missing[local]
-    if current.name not in [manifest.name for manifest in held.manifests]:
# an attempt that was overtaken writes over the one that goes on
fence | store.fences | fences::nothing_is_changed_for_who_was_overtaken[local-later-put]
-    if current > attempt:
owner | store.fences | fences::nothing_is_changed_for_who_was_overtaken[local-same-number-put]
-    if not owner.digest or existing.digest != owner.digest:
# two trainers of one number both write
claim of another | store.fences | stores::of_two_claims_of_a_number_the_first_holds[local]
-    if existing is None or existing.digest != claim.digest:
# a server writes into a directory that its trainer never claimed
unclaimed | store.fences | ownership::a_server_does_nothing_where_the_attempt_has_not_claimed
-    if existing is None:
-        raise TierError
+    if existing is None:
+        return
+        raise TierError
# an attempt that was overtaken writes over the one that goes on
fence before claim | store.store | fences::nothing_is_changed_for_who_was_overtaken[local-later-claim] & fences::nothing_is_changed_for_who_was_overtaken[kept-later-claim]
-            check_fence(claim.location, claim.attempt, claimed)
# two trainers of one number both write
claim read back | store.store | ownership::a_claim_is_created_exclusively_where_the_library_can
-                existing = self._claim_of(claim.attempt)  # of two writers, the last one may have won
+                existing = claim
# an attempt that was overtaken writes over the one that goes on
fence before put | store.store | fences::without_an_owner_the_number_counts[local-put] & fences::nothing_is_changed_for_who_was_overtaken[kept-later-put-what-is-there]
-[lambda: self._check_fences(manifest, attempt), lambda: self._noted(manifest)]
+[lambda: None, lambda: self._noted(manifest)]
fence before put of parts | store.store | fences::without_an_owner_the_number_counts[local-put-in-parts] & fences::without_an_owner_the_number_counts[kept-put-in-parts]
-        self._check_fences(manifest, attempt)
-        return
+        return
owner before put | store.store | fences::nothing_is_changed_for_who_was_overtaken[local-same-number-put-what-is-there]
-        self._all([lambda: check_fence(run, attempt, self.claimed()), self.check_owner])
+        check_fence(run, attempt, self.claimed())
owner before bytes | store.store | fences::who_is_overtaken_while_its_bytes_come_leaves_none[local] & fences::who_is_overtaken_while_its_bytes_come_leaves_none[kept]
-        self.check_owner()  # again: it has taken its time
owner before manifest | store.store | fences::a_writer_fenced_after_its_upload_commits_nothing[bytes]
-            self.check_owner()
-            self._write_manifest
+            self._write_manifest
owner after manifest | store.store | fences::a_writer_fenced_after_its_upload_commits_nothing[manifest]
-                    self._unnote(manifest)  # the other one may write the same files: they are swept
# an attempt that was overtaken deletes from the one that goes on
owner before delete | store.store | fences::nothing_is_changed_for_who_was_overtaken[local-same-number-delete] & fences::nothing_is_changed_for_who_was_overtaken[kept-same-number-delete]
-[lambda: self._check_owner(manifest.run), lambda: self._noted(manifest)]
+[lambda: None, lambda: self._noted(manifest)]
# an attempt that was overtaken sweeps what the next one writes
owner before sweep | store.store | fences::nothing_is_changed_for_who_was_overtaken[local-same-number-sweep] & fences::nothing_is_changed_for_who_was_overtaken[kept-same-number-sweep]
-        self._check_owner(current.run)
# an attempt that was overtaken deletes from the one that goes on
fence before delete | store.store | fences::nothing_is_changed_for_who_was_overtaken[local-later-delete]
-        self._all([lambda: check_fence(run, attempt, self.claimed()), self.check_owner])
+        self.check_owner()
# an older file replaces a newer one
fence of a file | store.store | stores::an_earlier_attempt_does_not_overwrite_a_later_ones_file[local]
-                check_fence(manifest.run, manifest.attempt, noted.attempt)
# an attempt that was overtaken writes over the one that goes on
fence in memory | server.uploads | ring::earlier_attempts_are_refused
-        check_fence(manifest.run, upload.attempt, self._registry.highest(upload.run))
fence of shards | store.commit | commit::a_later_attempt_fences[directory]
-        store.check_fence(first.run_id, attempt)
# whoever can write a token has all rights to all runs
signature of a token | protocol.credentials | scoped_tokens::a_token_is_what_its_secret_has_signed
-if not (given and is_signed and signed
+if not (given and signed
# a token that was lost holds for ever
end of a token | protocol.credentials | scoped_tokens::a_token_holds_until_it_expires
->= scope.expires_unix_s:
+>= float("inf"):
# a token for reading deletes snapshots
rights of a token | http.routes | scoped_tokens::each_request_is_denied_to_whom_it_should
-scope.rights is not Rights.WRITE:
+scope.rights is None:
# a token for one run reads and replaces all others
runs of a token | http.routes | scoped_tokens::a_run_is_not_reached_by_its_identity
-        self._check_key(scope, self.server.registry.key(run), parse_run(run)[0])
+        self._check_key(scope, "", parse_run(run)[0])
# a token for one run flushes, or reads, whatever a later version can be asked
requests for no run | http.routes | scoped_tokens::a_request_that_is_added_is_denied
-path not in _SHOW_WHAT_IS_COVERED:
+path == "":
# whoever is on the way reads snapshots and the token
certificate of a server | protocol.credentials | tls::an_untrusted_server_gets_nothing
-        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
+        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT); context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
# another host of the same CA reads snapshots and the token
name of a server | protocol.credentials | tls::the_name_of_a_host_is_verified
-        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
+        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT); context.check_hostname = False
# whoever has the token needs no certificate
certificate of a client | protocol.credentials | tls::clients_show_a_certificate
-            context.verify_mode = ssl.CERT_REQUIRED
+            context.verify_mode = ssl.CERT_OPTIONAL
# a stranger has a server hold a gigabyte, and nobody else is served
bound of connections by TLS | http.limits | tls::those_without_a_token_displace_each_other_only
-        if self.tls is not None:
# damaged weights are taken for good ones
checksum on arrival | http.upload_requests | server::a_part_that_came_damaged_is_never_committed
-digest if digest == frame.digest != NO_DIGEST else None
+digest if digest != NO_DIGEST else None
checksum that a sender is told | client.part_streams | server::a_part_damaged_on_its_way_is_sent_again
-                if digest == part.digest:
+                if True:
checksum at the commit of a transfer | server.uploads | ring::parts_must_all_have_arrived
-                if received.get(start) != noted:
# a damaged request is carried out
checksum of a request | http.fields | server::a_request_that_came_damaged_is_refused
-    if request.headers.get(DIGEST_HEADER, checksum(body)) != checksum(body):
# damaged weights are taken for good ones
checksum of what a server answers | client.remote | server::what_is_damaged_on_its_way_back_is_fetched_again
-            manifest.verify_range(start, into, self.url)
checksum at flush | server.worker | pace::a_damaged_newest_makes_the_one_before_it_owed_again
-                manifest.verify(slot.view(manifest.nbytes), "memory")
checksum of shards after they were written | store.commit | commit::what_is_damaged_while_it_is_written_is_not_committed[directory]
-            _verify(good)  # what was damaged meanwhile may have been written so
# a snapshot is made of the shards of two
a register is written once | server.ring | registers::a_register_is_written_once
-                if any(each.name == manifest.name and each != manifest for each in of_it):
# a snapshot counts that nobody can put together
registers fit each other | server.uploads | registers::a_shard_that_does_not_fit_is_no_register[gap]
-                self._ring.check_fits(upload.run, manifest)
# damaged weights are taken for good ones
checksum at verify, and at resume from memory | run.sources | cli::verify & registers::a_shard_that_left_memory_or_was_damaged_is_not_read
-    verify_file(fd, manifest.nbytes, manifest.checksums, manifest.part_bytes, where, progress, threads)
checksum of what storage gives, and of what is there already | store.store | stores::a_chunk_unlike_the_committed_one_is_noticed_as_it_comes[local-0] & stores::a_chunk_unlike_the_committed_one_is_noticed_as_it_comes[kept-0] & on_disk::what_is_there_but_damaged_is_written_anew
-        manifest.verify_range(start, into, self.url)
-
+
listing without the claim of this start | run.survey | resume::a_listing_that_lags_is_no_empty_tier[0]
-    if claimed and claim_name(claimed) not in holdings.attempts:
+    if False:
checksum of what is read later | run.reading | resume::a_file_damaged_between_check_and_use_falls_back[flip] & slot_readers::a_slot_that_is_damaged_is_found_as_it_is_copied
-        self._manifest.verify_range(start, into, self._where)
checksum at the adoption of slots | server.area | ring::a_damaged_leftover_is_dropped
-                manifest.verify(view, where)
# a damaged manifest is believed
checksum of manifests and records | untrusted | damage::a_flipped_bit_of_a_manifest_is_refused_or_harmless
-    if noted is not None and noted != _checksum(fields):
# damaged weights are taken for good ones
checksums at all | snapshot.parts | stores::a_chunk_unlike_the_committed_one_is_noticed_as_it_comes[local-0]
-        if checksum(image[start:stop]) != expected:
# the only copy of the newest snapshot is given away
newest safe nowhere stays | snapshot.shards | ring::one_slot_never_gives_its_only_snapshot_away
-    return is_durable and state is Status.COMMITTED
+    return True
what is owed stays | server.slots | ring::the_end_of_a_run_stays_until_the_tier_has_it
- and not slot.readers and slot not in self.owed]
+ and not slot.readers]
# a reader gets another snapshot's bytes
what is read stays | server.slots | ring::readers_are_safe_from_reuse
-if slot in may_go and not slot.readers and
+if slot in may_go and
# the only copy of the newest snapshot is given away
what is only here survives the server | server.ring | ring::an_orderly_end_keeps_what_is_safe_nowhere_else
-{slot for view in self.views() for slot in view.only_here} if keep_unsafe else set()
+set()
what a tier has lost is owed again | server.ring | several_servers::a_server_that_comes_back_empty_is_sent_the_newest
-                del slot.seen[url]
newest is by its order | server.slots | groups::only_what_is_complete_supersedes
-, max(superseding, default=None)
+, min(superseding, default=None)
# a torn snapshot is committed
version counters | capture.tensors | fit::a_tensor_that_moves_is_never_committed
-if tensor._version != version]
+if False]
dropped if torn | capture.writer | fit::a_tensor_that_moves_is_never_committed
-        if moved := pending.job.moved:
+        if moved := ():
# who reads a link in a history or a log sees the status page
link used once | http.page | page::a_link_opens_the_page_once
-        self._links.use(link)
# what a browser has been given reads snapshots, and deletes them
cookie for the page only | http.page | page::the_cookie_is_for_the_page_only
-return asked in (self.page, self.document) and self
+return self
# a client has the server read what only that can
storage read for its owner only | server.snapshot_server | page::nothing_is_read_where_the_attempt_may_not
-            self.check_owner(info.key)
# an impostor leads a browser to another host
link of the server asked | cli.status | page::an_impostor_leads_nowhere
-if not _PATH.fullmatch(path)
+if False
"""


@dataclass(frozen=True)
class Mutation:
    """One thing turned off.

    Attributes:
        name: of the mutation.
        module: of the package.
        old: text that its source has once.
        new: what stands there instead.
        why: what a user would lose.
        tests: the fastest ones that notice it.
    """

    name: str
    module: str
    old: str
    new: str
    why: str
    tests: tuple[str, ...]


def _mutations(rows: str) -> Iterator[Mutation]:
    tests = Path(__file__).resolve().parents[1]
    files = {path.stem: path.relative_to(tests.parent).as_posix() for path in tests.rglob("test_*.py")}
    why, lines = "", rows.strip("\n").split("\n")
    while lines:
        if (head := lines.pop(0)).startswith("# "):
            why, head = head[2:], lines.pop(0)
        name, within, noticing = head.split(" | ")
        old, new = ("\n".join(_taken(lines, sign)) if _begins(lines, sign) else None for sign in "-+")
        where = [each.split("::") for each in noticing.split(" & ")]
        found = tuple(f"{files[f'test_{file}']}::test_{test}" for file, test in where)
        yield Mutation(
            name, f"lightning_spot.{within}", str(old), _undone(str(old)) if new is None else new, why, found
        )


def _undone(line: str) -> str:
    word = line.split()[0]
    return line[: line.index(word)] + (f"{word} False:" if word in ("if", "elif") else "pass")


def _begins(lines: list[str], sign: str) -> bool:
    return bool(lines) and lines[0].startswith(sign)


def _taken(lines: list[str], sign: str) -> Iterator[str]:
    while _begins(lines, sign):
        yield lines.pop(0)[1:]


MUTATIONS = [*_mutations(ROWS)]
