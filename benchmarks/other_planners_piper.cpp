// Piper's search, its best plan with equal degrees, and its price of a given plan.
//
//     g++ -O2 -I CHECKOUT -o DRIVER other_planners_piper.cpp
//     cd CHECKOUT && DRIVER best|equal|price MEMORY_GIBIBYTES DEVICES SAMPLES
//
// `price` reads a plan from standard input. All print a plan and its seconds per sample;
// a plan that does not fit takes 1e30.

#define main piper_main
#include "algo.cpp"
#undef main

// An instance whose stages all have d x t devices, as one without data parallelism:
// d times as fast, with the reduction of gradients as time of its nodes.
Instance with_degrees(const Instance &whole, int d, int t) {
    Instance equal = whole;
    equal.maxDevices = whole.maxDevices / d;
    equal.mbsInBatch = whole.mbsInBatch / d;
    for (Edge &edge : equal.edges) {
        edge.communicationCost /= d;
    }
    for (Node &node : equal.nodes) {
        vector<TMPC> modes = node.TMPCs.at(t);
        for (TMPC &mode : modes) {
            double reduced = 4.0 * (d - 1) * mode.parameterSize / d;
            mode.timePerSample /= d;
            mode.timePerSample += reduced / whole.mbsInBatch / whole.bandwidth;
            for (auto &sync : mode.syncTimeFw) {
                sync.second /= d;
            }
            for (auto &sync : mode.syncTimeBw) {
                sync.second /= d;
            }
        }
        node.TMPCs = {{t, modes}};
    }
    return equal;
}

// The fastest plan whose stages all have the same degrees.
Result best_with_equal_degrees(const Instance &whole, const Graph &graph) {
    DATA_PARALLELISM_ALLOWED = false;
    Result best;
    double least = INFTY;
    for (int t : {1, 2, 4, 8}) {
        for (int d = 1; d * t <= whole.maxDevices && d <= whole.mbsInBatch; ++d) {
            if (whole.mbsInBatch % d != 0) {
                continue;
            }
            Instance equal = with_degrees(whole, d, t);
            int nodes = equal.nodes.size();
            equal.maxDevices = min(equal.maxDevices, nodes * t);
            Result found = Graph(equal).runDP();
            for (ResultStage &stage : found.stages) {
                stage.dataParallelDegree = d;
            }
            double seconds = graph.getTPSForResult(found);
            if (seconds < least) {
                least = seconds;
                best = found;
            }
        }
    }
    return best;
}

// A plan as Piper prints it, with the numbers of the nodes in its search.
Result read_plan(istream &stream, const Instance &instance) {
    json document;
    stream >> document;
    Result plan;
    for (const json &read : document.at("stages")) {
        ResultStage stage;
        stage.dataParallelDegree = read.at("dataParallelDegree");
        stage.tensorParallelDegree = read.at("tensorParallelDegree");
        for (const json &pair : read.at("TMPCids")) {
            int node = instance.newNumber.at(pair.at(0));
            stage.nodes.push_back(node);
            stage.TMPCids[node] = pair.at(1);
        }
        plan.stages.push_back(stage);
    }
    return plan;
}

int main(int, char **arguments) {
    string wanted = arguments[1];
    Instance instance = readBERTA100(32);
    instance.maxMemoryPerDevice = atof(arguments[2]) * (1 << 30);
    instance.maxDevices = atoi(arguments[3]);
    instance.mbsInBatch = atoi(arguments[4]);
    instance.bandwidth = 25.0 * (1LL << 30);
    Graph graph(instance);
    Result plan;
    if (wanted == "best") {
        plan = graph.runDP();
    } else if (wanted == "equal") {
        plan = best_with_equal_degrees(instance, graph);
    } else {
        plan = read_plan(cin, instance);
    }
    double seconds = graph.getTPSForResult(plan);
    graph.renumberResultBack(plan);
    json document = plan;
    document["seconds"] = seconds;
    cout << document << endl;
}
